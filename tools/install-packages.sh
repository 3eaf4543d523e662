#!/bin/sh
# Installs the Debian or Ubuntu packages that the demo and the tests need.
#
#   tools/install-packages.sh      compiler, build tools, libraries and matplotlib for the
#                                  presets "demo" and "test"
#   tools/install-packages.sh ci   the same, and what .ci/run needs beyond
#
# Runs as root, or through sudo. Nothing but apt-get is called; nothing is removed.
# $packages is unquoted below: it is split into package names on purpose.
# shellcheck disable=SC2086
set -eu

say() { printf 'install-packages: %s\n' "$*"; }
fail() {
  say "error: $*" >&2
  exit 1
}

packages="g++ cmake ninja-build libgtest-dev libeigen3-dev nlohmann-json3-dev libcli11-dev
  libpcre2-dev python3-matplotlib python3-pip"

case "${1-}" in
  "") ;;
  ci) packages="$packages git clang clang-format clang-tidy libbenchmark-dev g++-aarch64-linux-gnu
    qemu-user" ;;
  *) fail "unknown argument '$1'; use no argument or 'ci'" ;;
esac

command -v apt-get >/dev/null 2>&1 ||
  fail "apt-get not found: only Debian and Ubuntu are supported. Install the equivalents of:" \
    $packages

if [ "$(id -u)" -eq 0 ]; then
  sudo=""
elif command -v sudo >/dev/null 2>&1; then
  sudo="sudo"
else
  fail "root is needed to install packages, and there is no sudo"
fi

apt() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q "$@"; }

say "installing:" $packages
apt update || fail "apt-get update failed"
apt install -y --no-install-recommends $packages || fail "apt-get install failed"

cmake_version=$(cmake --version | sed -n 's/^cmake version //p')
dpkg --compare-versions "$cmake_version" ge 3.25 ||
  fail "the presets need CMake 3.25 or newer; this system has $cmake_version (Debian 12 has 3.25)"

say "done; next: cmake --workflow --preset demo, or --preset test"
