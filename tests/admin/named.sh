#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# named.sh DIR: what the plugin in the packages of DIR (*.deb or *.rpm) loads and runs lies in
# the package that docs/admin.md names for it, under the path that the plugin knows.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
failures=0
failed() { echo "NOT OK: $*" && failures=$((failures + 1)); }

shopt -s nullglob
packages=("${1:?a folder with packages}"/*.deb "$1"/*.rpm)
[ "${#packages[@]}" -gt 0 ] || { echo "no packages in $1" >&2 && exit 2; }

name() { if [[ $1 == *.deb ]]; then dpkg-deb -f "$1" Package; else rpm -qp --qf '%{NAME}\n' "$1"; fi; }
files() { if [[ $1 == *.deb ]]; then dpkg-deb -c "$1" | awk '{ print $6 }' | sed 's|^\./|/|'; else rpm -qlp "$1"; fi; }
content() { # package file
    if [[ $1 == *.deb ]]; then dpkg-deb --fsys-tarfile "$1" | tar -xO ".$2"; else rpm2cpio "$1" | cpio -i --quiet --to-stdout ".$2"; fi
}
# The package of WHAT by the first table of docs/admin.md, whose columns are: what, deb, rpm.
documented() { # what package-file
    awk -F ' *[|] *' -v what="$1" -v column="$([[ $2 == *.deb ]] && echo 3 || echo 4)" 'index($2, what) == 1 { print $column; exit }' docs/admin.md
}
owner() { # file -> name of the package that has it
    local package
    for package in "${packages[@]}"; do
        if grep -qxF -- "$1" <<<"$(files "$package")"; then name "$package"; fi
    done
}

known() { # what pattern: one path in the plugin, owned as it is documented
    local paths wanted
    paths=$(grep -aoE "/[A-Za-z0-9_/.-]+/$2" "$work/plugin" | sort -u)
    wanted=$(documented "$1" "$plugin_package")
    if [ -z "$paths" ] || [ -z "$wanted" ] || [ "$(owner "$paths")" != "$wanted" ]; then
        failed "$1: the plugin knows '$paths', package '$(owner "$paths")' has it, docs/admin.md says '$wanted'"
    else
        echo "ok: $paths is in $wanted"
    fi
}

work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
plugin_package=
for package in "${packages[@]}"; do
    plugin=$(files "$package" | grep '/ep_overlap\.so$') && plugin_package=$package && break
done
[ -n "$plugin_package" ] || { failed "no package has ep_overlap.so" && exit 1; }
content "$plugin_package" "$plugin" >"$work/plugin"
[ -s "$work/plugin" ] || { failed "$plugin cannot be unpacked" && exit 1; }
[ "$(name "$plugin_package")" = "$(documented plugin "$plugin_package")" ] || failed "the plugin is in $(name "$plugin_package")"
known library 'libep_overlap\.so[.0-9]*'
known probe 'ep-overlap/probe'
[ "$failures" = 0 ]
