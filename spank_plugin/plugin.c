/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin.h"

struct vhpc_plugin vhpc_plugin;
