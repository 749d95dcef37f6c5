# SPDX-License-Identifier: Apache-2.0
# Compiler and linker flags of every C target of vhpc: INTERFACE target vhpc_flags.
#
# VHPC_SANITIZE=ON builds with AddressSanitizer and UndefinedBehaviorSanitizer;
# VHPC_FUZZ=ON (clang only) adds libFuzzer's coverage on top of them.
option(VHPC_SANITIZE "Build with address and undefined behaviour sanitizers" OFF)
option(VHPC_FUZZ "Build the libFuzzer targets (clang)" OFF)

if(NOT TARGET vhpc_flags)
  add_library(vhpc_flags INTERFACE)
  target_compile_features(vhpc_flags INTERFACE c_std_17)
  target_compile_definitions(vhpc_flags INTERFACE _GNU_SOURCE)
  target_compile_options(vhpc_flags INTERFACE
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes
    -Wformat=2 -Wundef -Wvla -Werror
    -fno-common -fstack-protector-strong -fstack-clash-protection)
  if(VHPC_SANITIZE OR VHPC_FUZZ)
    target_compile_options(vhpc_flags INTERFACE
      -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
    target_link_options(vhpc_flags INTERFACE -fsanitize=address,undefined)
    if(VHPC_FUZZ)
      target_compile_options(vhpc_flags INTERFACE -fsanitize=fuzzer-no-link)
    endif()
  else()
    # _FORTIFY_SOURCE needs optimisation; 3 needs gcc 12 or clang 15, and falls back to 2.
    target_compile_options(vhpc_flags INTERFACE
      -O2 -g $<IF:$<C_COMPILER_ID:GNU>,-D_FORTIFY_SOURCE=3,-D_FORTIFY_SOURCE=2>)
    target_link_options(vhpc_flags INTERFACE -Wl,-z,relro,-z,now,-z,noexecstack)
  endif()
endif()
