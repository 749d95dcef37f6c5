# SPDX-License-Identifier: Apache-2.0
"""Partition files of OpenSM that the linter accepts, and that it refuses."""

from __future__ import annotations

DEFAULT = "Default=0x7fff, ipoib : ALL=limited, SELF=full ;\n"
A, B, C = (f"0x02cc1000000{rank}0000" for rank in range(3))
# On the right: what opensm 3.3.23 makes of it (those with OPEN are tried in test_opensm_reads.py).
OPEN = "parse error: every port becomes a full member of 0xffff, every job's key is gone"
BAD = [
    # text, line, reason, what opensm does
    ("", 1, "there is no partition", OPEN),
    ("# nothing\n\n# more\n", 4, "there is no partition", OPEN),
    (DEFAULT + "k=0x1000 : 0xzz=full ;\n", 2, "is not a port GUID", OPEN),
    (DEFAULT + f"k=0x1000 {A}=full ;\n", 2, "is not NAME=0xPKEY", OPEN),
    (DEFAULT + f"k=0x1000 : {A}=full\nl=0x1001 : {B}=full ;\n", 2, "ends without ','", OPEN),
    (DEFAULT + f"k=0x1000 : {A}=full,\nl=0x1001 : {B}=full ;\n", 3, "begins a partition", OPEN),
    (DEFAULT + "what is this\n", 2, "has no ';'", OPEN),
    (DEFAULT + "what is this ;\n", 2, "is not NAME=0xPKEY", OPEN),
    (DEFAULT + "k=0x1000 : 0x02cc1", 2, "incomplete", "accepted, with a GUID that nobody has"),
    (DEFAULT + f"k=0x1000 : {A}=full ;", 2, "incomplete", "accepted, but a torn write looks the same"),
    (DEFAULT + "k=0x1000 : " + ", ".join([f"{A}=full"] * 200) + " ;\n", 2, "4095", OPEN),
    (DEFAULT + f"k=0x1000 : {A}=full, {A}=limited ;\n", 2, "twice", "the last wins"),
    (DEFAULT + f"k=0x1000 : {A}=full ;\nl=0x1000 : {B}=full ;\n", 3, "joins the two", "one partition"),
    (DEFAULT + f"k=0x1000 : {A}=full ;\nl=0x9000 : {B}=full ;\n", 3, "membership bit", "one partition"),
    (DEFAULT + f"k=0x11000 : {A}=full ;\n", 2, "is not a key", "0x1000"),
    (DEFAULT + f"k=1000 : {A}=full ;\n", 2, "is not a key", "0x03e8"),
    (DEFAULT + f"k=0x100 : {A}=full ;\n", 2, "is not a key", "0x0100, where 0x1000 may be meant"),
    (DEFAULT + f"k=0x0000 : {A}=full ;\n", 2, "would choose", "0x0001"),
    (DEFAULT + f"k=0x8000 : {A}=full ;\n", 2, "membership bit", "0x0001"),
    (DEFAULT + f"k : {A}=full ;\n", 2, "is not NAME=0xPKEY", "0x0001"),
    (DEFAULT + f"k= : {A}=full ;\n", 2, "is not a key", "0x0001"),
    (DEFAULT + f"k=0x7fff : {A}=full ;\n", 2, "only it", "full in the default partition"),
    (DEFAULT + f"k=0xffff : {A}=full ;\n", 2, "membership bit", "full in the default partition"),
    (DEFAULT + f"k=0x1000 : {A}=full ;\nl=0x1001 : {A}=full ;\n", 3, "already", "the port has both keys"),
    (DEFAULT + "k=0x1000 : A=full ;\n", 2, "is not a port GUID", "every port joins"),
    (DEFAULT + "k=0x1000 : ALL=full ;\n", 2, "are not named", "every port joins"),
    (DEFAULT + "k=0x1000 : ALL_CAS=limited ;\n", 2, "are not named", "every adapter joins"),
    (DEFAULT + f"k=0x1000 : {A} ;\n", 2, "needs =full", "limited"),
    (DEFAULT + f"k=0x1000 : {A}=ful ;\n", 2, "needs =full", "full"),
    (DEFAULT + f"k=0x1000 : {A}= ;\n", 2, "needs =full", "full"),
    (DEFAULT + f"k=0x1000 : {A}=Full ;\n", 2, "needs =full", "limited"),
    (DEFAULT + f"k=0x1000 : {A}=both ;\n", 2, "needs =full", "full"),
    (DEFAULT + f"k=0x1000, index0 : {A}=full ;\n", 2, "not a flag", "ignored"),
    (DEFAULT + f"k=0x1000, indx : {A}=full ;\n", 2, "not a flag", "guessed"),
    (DEFAULT + f"k=0x1000, sl=1 : {A}=full ;\n", 2, "without ipoib", "ignored"),
    (DEFAULT + f"k=0x1000, ipoib, ipoib : {A}=full ;\n", 2, "twice", "-"),
    (DEFAULT + f"k=0x1000 ipoib : {A}=full ;\n", 2, "between the key", "-"),
    (DEFAULT + "k=0x1000 : mgid=ff12::1 ;\n", 2, "begins a partition", "takes the rest of the line"),
    (DEFAULT + "k=0x1000 : NONE ;\n", 2, "needs =full", "-"),
    (DEFAULT + "k=0x1000 : ;\n", 2, "without members", "-"),
    (DEFAULT + f"k=0x1000 : {A}=full, ;\n", 2, "is not a member", "-"),
    (DEFAULT + f"k=0x1000 : {A}=full ; l=0x1001 : {B}=full ;\n", 2, "one statement a line", "-"),
    (DEFAULT + f"k=0x1000 : {A}=full, # or not\n {B}=full ;\n", 2, "comment", "-"),
    (DEFAULT + f"k=0x1000 : {A}=full ;\nk=0x1001 : {B}=full ;\n", 3, "also the name", "accepted"),
    (DEFAULT + f"Def=0x1000 : {A}=full ;\n", 2, "taken for Default", "-"),
    (DEFAULT + f"k\N{LATIN SMALL LETTER E WITH ACUTE}=0x1000 : {A}=full ;\n", 2, "ASCII", "-"),
    (DEFAULT + f"k=0x1000 : {A}=full\r\n;\n", 2, "ASCII", "-"),
    (DEFAULT + "k=0x1000 : 0x0000000000000000=full ;\n", 2, "not the GUID of a port", "-"),
    (f"k=0x1000 : {A}=full ;\n", 1, "must be Default", "the default rule comes first anyway"),
    ("Default=0x7fff, ipoib : ALL=full ;\n", 1, "must be ALL=limited", "every port is full in 0xffff"),
    ("Default=0x7fff : ALL=limited, SELF=full, " + A + "=full ;\n", 1, "must be ALL=limited", "as written"),
    ("Default=0x7fff : SELF=full ;\n", 1, "must be ALL=limited", "ALL=limited in spite of it"),
]
