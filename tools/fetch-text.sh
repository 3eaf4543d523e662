#!/bin/sh
# Fetches the text of the quality tables: Isaac Newton's "Opticks" (1730, public domain), 567 kB of
# English prose, which the Debian and Ubuntu packages of Go's source carry as test data.
#
#   tools/fetch-text.sh [file, else build/texts/opticks.txt of this project]
#
# Needs apt-get; installs nothing. A file that is there already is checked and kept.
set -eu

sha256=d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd
file=${1:-$(dirname "$0")/../build/texts/opticks.txt}

say() { printf 'fetch-text: %s\n' "$*"; }
fail() {
  say "error: $*" >&2
  exit 1
}
is_right() { echo "$sha256  $1" | sha256sum --check --status 2>/dev/null; }

if is_right "$file"; then
  say "$file is there"
  exit 0
fi
[ ! -e "$file" ] || fail "$file is there, but is another text; move it away"
command -v apt-get >/dev/null 2>&1 || fail "apt-get not found: only Debian and Ubuntu have the package"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
package=$(apt-cache depends golang-src | sed -n 's/^ *Depends: \(golang-[0-9.]*-src\)$/\1/p' | head -n 1)
[ -n "$package" ] || fail "no package golang-src is known; run apt-get update"
say "downloading $package"
(cd "$folder" && apt-get -q download "$package" >log 2>&1) || fail "download: $(tail -n 1 "$folder/log")"
dpkg-deb --fsys-tarfile "$folder/$package"_*.deb |
  tar -xO --wildcards './usr/share/go-*/src/testdata/Isaac.Newton-Opticks.txt' >"$folder/text" ||
  fail "$package has no Isaac.Newton-Opticks.txt"
is_right "$folder/text" || fail "the text in $package is not the one that was measured (SHA-256)"
mkdir -p "$(dirname "$file")"
mv "$folder/text" "$file"
say "$file"
