#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs.sh [TREE]: links of README.md and docs/*.md lead to a file, paths of the tree that they name
# are there (or are a program's, whose source is there), and their lines are at most 120 long.
# Tables cannot be wrapped; the two pages of figures are left as they are.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

longest=120
cd "$root" || exit 2
mapfile -t pages < <(ls README.md docs/*.md 2>/dev/null)
need_files "${pages[@]}"

links() { # page: "LINE:TARGET" of each link that is no address
    grep -noE '\]\([^)]+\)' "$1" | sed -E 's/^([0-9]+):\]\(([^)#]*).*/\1:\2/' | grep -vE ':(https?:.*)?$'
}
paths() { # page
    grep -noE '(^|[^A-Za-z0-9_/.$>-])(tests|tools|lib|docs|jobscripts|packaging|python|etc|spank|m4)/[A-Za-z0-9_./*-]+' "$1" |
        sed -E 's/^([0-9]+):[^A-Za-z.]?/\1:/; s/[.,:]+$//'
}
exists() { compgen -G "$1" >/dev/null || compgen -G "$1.c*" >/dev/null || compgen -G "lib/$1" >/dev/null; }

violations=$(for page in "${pages[@]}"; do
    links "$page" | while IFS=: read -r line target; do
        [ -e "$(dirname "$page")/$target" ] || echo "$page:$line: leads nowhere: $target"
    done
    paths "$page" | while IFS=: read -r line path; do
        exists "$path" || echo "$page:$line: is not there: $path"
    done
    case $page in
    docs/performance*.md) ;;
    *) awk -v page="$page" -v longest=$longest '!/^\|/ && length > longest { print page ":" FNR ": longer than " longest }' "$page" ;;
    esac
done)
finish "$violations" "${#pages[@]}"
