#!/bin/sh
# Usage: symbols.sh NM OBJECT1 OBJECT2
#
# Fails if two objects, compiled for different instruction sets, define the same function of the
# library: the linker would keep one copy for both, and an old processor would run the new one's
# instructions. Functions of the library are always inlined, have internal linkage or live in a
# namespace named after the instruction set.
set -eu
functions() { "$1" --defined-only "$2" | awk '$2 == "W" && $3 ~ /^_ZNK?5kvarn/ { print $3 }' | sort -u; }

first=$(functions "$1" "$2")
second=$(functions "$1" "$3")
shared=$(printf '%s\n%s\n' "$first" "$second" | sed '/^$/d' | sort | uniq -d)
if [ -n "$shared" ]; then
  echo "both objects define:"
  echo "$shared" | c++filt
  exit 1
fi
echo "no function of the library is shared"
