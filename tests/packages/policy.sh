#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# policy.sh: in a Debian tree with the policy of SELinux, link vhpc's module of /packages with it, as semodule does,
# and ask what the whole policy allows.  Writes to /packages/policy/.
set -euo pipefail
report=/packages/policy
mkdir -p $report
cd /tmp
rpm --install --nodeps --noscripts /packages/vhpc-selinux-*.rpm
mkdir modules
python3 - /usr/share/selinux/default/*.pp.bz2 <<'PYTHON'
import bz2, pathlib, sys

for name in map(pathlib.Path, sys.argv[1:]):
    pathlib.Path("modules", name.stem).write_bytes(bz2.decompress(name.read_bytes()))
PYTHON
mv modules/base.pp .
# expanding checks the policy's neverallow rules
semodule_link -o whole.pp base.pp modules/*.pp /usr/share/selinux/packages/default/vhpc.pp > $report/linked 2>&1
semodule_expand whole.pp policy.33 >> $report/linked 2>&1
ask() { name=$1; shift; sesearch "$@" policy.33 > "$report/$name"; }
ask connects -A -s svirt_t -p connectto -c unix_stream_socket
ask sockets -A -s svirt_t -t vhpc_run_t
ask root -A -s svirt_t -t virt_content_t -c file
ask disk -A -s svirt_t -t virt_image_t -c file
ask state -A -s svirt_t -t vhpc_var_lib_t
ask starts -T -s initrc_t -t vhpc_confine_exec_t -c process
ask folders -T -s initrc_t -t vhpc_var_lib_t -c dir
ask console -A -s virtlogd_t -t vhpc_run_t -c file
ask labels -A -s virtd_t -t vhpc_run_t -c file -p relabelto
ask memory -A -s vhpc_helper_t -t svirt_tmpfs_t -c file -p map
