#!/bin/sh
# Regenerate the *.hwloc files: what hwloc's own lstopo reads from each captured tree.
# The caches that slurmd ignores are filtered out, and disallowed CPUs are kept, as slurmd does.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for archive in *.tar.bz2; do
	name=${archive%.tar.bz2}
	mkdir "$work/$name"
	tar -xjf "$archive" -C "$work/$name"
	set -- --input "$work/$name"/* --if fsroot --of console --no-io --disallowed --filter L1:none --filter L2:none --filter L1i:none
	{
		echo "# $(lstopo-no-graphics --version)"
		for type in package core pu numanode; do
			lstopo-no-graphics "$@" --cpuset --only "$type"
		done
		lstopo-no-graphics "$@" --physical --cpukinds
		lstopo-no-graphics "$@" --physical --distances
	} 2>/dev/null | sed 's/ *$//' >"$name.hwloc"
done
