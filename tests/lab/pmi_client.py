# SPDX-License-Identifier: Apache-2.0
"""A client of PMI-1 or PMI-2 in Python, for images without an MPI library; argument: 1 or 2."""

from __future__ import annotations

# A client of PMI-1 or PMI-2, after MPICH's documents of the protocols: publishes the name of its host, and
# reads those of all tasks after a barrier.
CLIENT = """
import os, socket, sys
two = sys.argv[1] == "2"
rank, size, step = (os.environ[name] for name in ("PMI_RANK", "PMI_SIZE", "PMI_JOBID"))
pmi = os.fdopen(int(os.environ["PMI_FD"]), "r+b", buffering=0)
def line(text):
    pmi.write(text.encode() + b"\\n")
    return b"".join(iter(lambda: pmi.read(1), b"\\n")).decode()
def exactly(count):
    data = b""
    while len(data) < count:
        data += pmi.read(count - len(data))
    return data.decode()
def message(*fields):
    text = "".join(field + ";" for field in fields)
    pmi.write(b"%6d" % len(text) + text.encode())
    return exactly(int(exactly(6)))
def ask(command, *fields):
    return message(command, *fields) if two else line(" ".join((command, *fields)))
def value(answer):
    return answer.partition("value=")[2].rstrip(";")
assert " rc=0 " in line("cmd=init pmi_version=%d pmi_subversion=%d" % ((2, 0) if two else (1, 1)))
if two:
    message("cmd=fullinit", "pmijobid=" + step, "pmirank=" + rank, "threaded=FALSE")
    mapping = message("cmd=info-getjobattr", "key=PMI_process_mapping")
else:
    step = line("cmd=get_my_kvsname").partition("kvsname=")[2]
    mapping = line("cmd=get kvsname=%s key=PMI_process_mapping" % step)
print("mapping", value(mapping))
kvs = "jobid=" + step if two else "kvsname=" + step
put = ("cmd=kvs-put",) if two else ("cmd=put", kvs)
ask(*put, "key=host-" + rank, "value=" + socket.gethostname())
ask("cmd=kvs-fence" if two else "cmd=barrier_in")
get = "cmd=kvs-get" if two else "cmd=get"
names = [value(ask(get, kvs, *(["srcid=-1"] if two else []), "key=host-%d" % i)) for i in range(int(size))]
print("hosts", *names)
ask("cmd=finalize")
print("end", pmi.read(1))
"""
