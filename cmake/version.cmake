# SPDX-License-Identifier: Apache-2.0
# VHPC_VERSION: the version of vhpc, as the Python package states it.
set(_source ${CMAKE_CURRENT_LIST_DIR}/../python/vhpc_slurm/__init__.py)
if(NOT VHPC_VERSION)
  file(STRINGS ${_source} _line REGEX "^__version__")
  string(REGEX REPLACE "[^\"]*\"([^\"]*)\".*" "\\1" VHPC_VERSION "${_line}")
endif()
# A folder that was configured before is configured again when the version changes.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_source})
