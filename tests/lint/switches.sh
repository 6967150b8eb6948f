#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# switches.sh [TREE]: every EP_OVERLAP_* variable that the code reads or sets is described in
# README.md or docs/, and what these, the tests and the scripts name is one that the code has.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root" || exit 2

names() { grep -oE 'EP_OVERLAP_[A-Z][A-Z_]*' | sort -u; }

places() { # folder or file...: FILE:LINE:NAME; not the header's guard, nor a group as EP_OVERLAP_CUDA_*
    grep -rnIoE '\bEP_OVERLAP_[A-Z][A-Z_]*[A-Z]\b' "$@" 2>/dev/null | grep -v ':EP_OVERLAP_H$'
}

code=$(sources '*.c' '*.h' '*.cu' '*.cuh' '*.inl' '*.py' | grep -E '^(lib|spank|tools|python)/' |
    xargs grep -hoE "[\"']EP_OVERLAP_[A-Z_]+[\"']" | names)
need_files ${code:+"$code"}
# (what a job script hands to its own steps; and the name of the tests that stands for any)
others=$(sources '*.sbatch' | xargs grep -hoE '^(export )?EP_OVERLAP_[A-Z_]+=' | names)$'\nEP_OVERLAP_X'
users=(README.md docs etc jobscripts packaging python tests)
violations=$(
    comm -23 <(echo "$code") <(places README.md docs | cut -d : -f 3 | sort -u) | while read -r name; do
        place=$(places lib spank tools python | grep -m 1 ":$name\$")
        echo "${place%:*}: neither README.md nor docs/ describes $name"
    done
    # (tests/lint plants wrong names)
    places "${users[@]}" | grep -v '^tests/lint/' | while IFS=: read -r file line name; do
        grep -qxF "$name" <<<"$code"$'\n'"$others" || echo "$file:$line: the code has no $name"
    done
)
finish "$violations" "$(places "${users[@]}" | cut -d : -f 1 | sort -u | wc -l)"
