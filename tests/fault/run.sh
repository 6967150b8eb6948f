#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
usage() {
    cat <<'END'
run.sh [-q] [-g] [-w WAY] [-v GPUS] [-k KINDS] [-j JOBS] [-n RANKS] [-G GROUPS] [-l SECONDS] [-o TSV]
       [-d DOCUMENT] [BUILD]

One rank of a small training job is killed, stopped, slow, late or does something else than
the others, in every phase; the others have to end within the limit, with status 1 and one
line that names the rank and the phase, and leave nothing. One line a case.

  -q            a few cases of each kind: what make check runs
  -g            the CUDA engine: BUILD/fault of tests/gpu/build.mk (else BUILD/tests/fault/fault).
                The next job is the next case here, and one more at the end.
  -w WAY        how ranks meet (environment; bootstrap, comm: an ncclComm_t), or nccl: rows go
                through NCCL as well
  -v "GPUS..."  what the cases see in turn as CUDA_VISIBLE_DEVICES ("0,1")
  -k KINDS      of killed stopped slow late twisted (all), in this order
  -j JOBS       cases at a time (2)
  -n RANKS      of a job (3; CUDA 2)    -G GROUPS     of as many of them each (1)
  -l SECONDS    limit of a group (2)
  -o TSV        the cases, as fields
  -d DOCUMENT   writes the tables (table.sh) into it, between its lines "<!-- ENGINE -->"
END
}
quick=0 gpu=0 kinds='killed stopped slow late twisted' jobs=2 ranks='' limit=2 way=environment groups=1 tsv='' document='' visible=0,1 alone=''
while getopts qgw:k:j:n:G:l:o:d:v:h option; do
    case $option in
    q) quick=1 ;;
    g) gpu=1 ;;
    w) way=$OPTARG ;;
    k) kinds=$OPTARG ;;
    j) jobs=$OPTARG ;;
    n) ranks=$OPTARG ;;
    G) groups=$OPTARG ;;
    l) limit=$OPTARG ;;
    o) tsv=$OPTARG ;;
    d) document=$OPTARG ;;
    v) visible=$OPTARG ;;
    h) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
done
shift $((OPTIND - 1))
build=${1:-${EPO_BUILD_DIR:-build}}
if [ "$gpu" = 1 ]; then
    program=$build/fault ranks=${ranks:-2} engine=cuda
else
    program=$build/tests/fault/fault ranks=${ranks:-3} engine=host
fi
[ -x "$program" ] || { echo "run.sh: no program $program: make it first" >&2 && exit 2; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# What the GPUs hold, in MB, once nothing of the tests runs on them any more.
gpu_memory() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | tr '\n' ' '; }

"$program" -w "$way" list >"$work/all" || exit 2
for kind in $kinds; do
    awk -F'\t' -v kind="$kind" '$1 == kind' "$work/all"
done >"$work/cases"
if [ "$quick" = 1 ]; then
    grep -E '^(killed|stopped).*(group creation|forward: |flush$)|^slow.*(backward: experts)|^late.*backward: combine|^twisted.*(shapes|top-k|order|fail)' \
        "$work/cases" >"$work/quick"
    mv "$work/quick" "$work/cases"
fi
if [ "$gpu" = 1 ]; then
    # Held open, or the driver would make the GPUs ready anew for each case.
    # shellcheck disable=SC2034
    for node in /dev/nvidia[0-9]*; do exec {held}<"$node"; done
    sleep 1 # what ran before may still be giving back
    before=$(gpu_memory) alone=-x
fi
begin=$SECONDS
export program ranks groups limit way work visible gpu alone engine
one_case() { # KIND<TAB>PHASE, in a shell of its own
    read -ra see <<<"$visible"
    [ "$gpu" = 0 ] || export CUDA_VISIBLE_DEVICES=${see[${slot:-0} % ${#see[@]}]}
    IFS=$'\t' read -r kind what <<<"$1"
    # In the foreground: whoever ends this script's group ends the judges too.
    timeout --foreground -k 2 100 "$program" $alone -w "$way" -n "$ranks" -g "$groups" -l "$limit" "$kind" "$what" >"$work/out.$$" 2>&1
    local status=$?
    [ "$status" = 0 ] || [ "$status" = 1 ] ||
        printf '%s\t%s\t%s\tFAIL\t-\t-\t-\tstatus %s\n' "$engine" "$kind" "$what" "$status" >>"$work/out.$$"
    cat "$work/out.$$" >>"$work/table"
    cat "$work/out.$$"
}
export -f one_case
# A GPU that is full is full for all that run on it.
grep "memory full" "$work/cases" >"$work/by_itself"
[ "$gpu" = 1 ] || : >"$work/by_itself"
grep -vxF -f "$work/by_itself" "$work/cases" | tr '\n' '\0' |
    xargs -0 -P "$jobs" --process-slot-var=slot -I '{}' bash -c 'one_case "$1"' run '{}'
visible=${visible// /,} # each rank a GPU of its own, if there are as many
while IFS= read -r line; do one_case "$line" </dev/null; done <"$work/by_itself"
# On the host also what is around the job: every call that fails, full and missing places.
around() { # COMMAND...: one that cannot even run has no case that fails
    nice "$@" | tee -a "$work/table"
    local status=${PIPESTATUS[0]}
    [ "$status" -le 1 ] ||
        printf '%s\tscarce\t%s\tFAIL\t-\t-\t-\tstatus %s\n' "$engine" "$1" "$status" | tee -a "$work/table"
}
if [ "$way$groups" != environment1 ]; then
    : # the same as ever
elif [ "$gpu$quick" = 00 ]; then
    around "$build/tests/fault/scarce"
    around "$(dirname "$0")/places.sh" "$build"
elif [ "$gpu" = 0 ]; then
    around "$build/tests/fault/scarce" -e 11
fi
failed=$(grep -c '	FAIL	' "$work/table")
passed=$(grep -c '	ok	' "$work/table")
echo "$engine: $passed cases as they have to be, $failed not, in $((SECONDS - begin)) s"
if [ "$gpu" = 1 ]; then
    "$program" -w "$way" -g "$groups" -n "$ranks" nothing || failed=$((failed + 1))
    after=$(gpu_memory)
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ "$after" = "$before" ] && break
        sleep 0.2
        after=$(gpu_memory)
    done
    echo "memory of the GPUs before and after, MB: $before, $after"
    awk -v a="$before" -v b="$after" 'BEGIN { n = split(a, x); split(b, y); for (i = 1; i <= n; i++) if (y[i] > x[i]) exit 1 }' ||
        failed=$((failed + 1))
fi
# In the order of the list, whatever ended first.
awk -F'\t' 'NR == FNR { at[$0] = FNR; next } !/^#/ { print (($2 FS $3) in at ? at[$2 FS $3] : 1000 + FNR) "\t" $0 }' \
    "$work/all" "$work/table" | sort -s -n -k 1,1 | cut -f 2- >"$work/sorted"
[ -z "$tsv" ] || cat "$work/sorted" >"$tsv"
if [ -n "$document" ]; then
    "$(dirname "$0")/table.sh" "$work/sorted" >"$work/markdown"
    awk -v mark="<!-- $engine -->" -v table="$work/markdown" '
        $0 != mark { if (!inside) print; next }
        { print; inside = !inside; if (inside) while ((getline line < table) > 0) print line }' "$document" >"$work/document" &&
        cat "$work/document" >"$document"
fi
[ -s "$work/cases" ] && [ "$passed" -ge "$(wc -l <"$work/cases")" ] && [ "$failed" = 0 ]
