# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Adds the plugin's options to whatever completes srun, sbatch and salloc already.
# Source it after bash-completion, from ~/.bashrc or a file in /etc/profile.d:
#
#     . /usr/share/ep-overlap/srun-completion.bash

_ep_overlap_srun() {
    local cur=${COMP_WORDS[COMP_CWORD]} other=_ep_overlap_other_${1##*/}
    COMPREPLY=()
    # Slurm's own first, as it was when this file was read, or loaded now.
    [ -z "${!other:-}" ] || "${!other}" "$@"
    local option words='' prefix=$cur
    # "--option=value" comes as one word or as three, by COMP_WORDBREAKS
    if [ "$cur" = = ]; then
        option=${COMP_WORDS[COMP_CWORD - 1]} prefix=
    elif [ "$COMP_CWORD" -ge 2 ] && [ "${COMP_WORDS[COMP_CWORD - 1]}" = = ]; then
        option=${COMP_WORDS[COMP_CWORD - 2]}
    elif [[ $cur == --*=* ]]; then
        option=${cur%%=*} prefix=${cur#*=}
    else
        option=${COMP_WORDS[COMP_CWORD - 1]}
    fi
    case $option in
    --ep-overlap) words="on off auto" ;;
    --ep-dispatcher) words="alltoall flex flex:deepep flex:hybridep flex:ncclep" ;;
    *) [[ $cur != --* ]] || words="--ep-overlap= --ep-dispatcher= --delay-wgrad --no-delay-wgrad" ;;
    esac
    [ -n "$words" ] || return 0
    local more=()
    mapfile -t more < <(compgen -W "$words" -- "$prefix")
    COMPREPLY+=("${more[@]}")
    if [ "${#COMPREPLY[@]}" = 1 ] && [[ ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
    return 0
}

_ep_overlap_srun_begin() {
    local name spec other
    for name in srun sbatch salloc; do
        # bash-completion loads a command's completion at first use: now
        if ! complete -p "$name" >/dev/null 2>&1; then
            if declare -F _comp_load >/dev/null; then
                _comp_load "$name" >/dev/null 2>&1
            elif declare -F _completion_loader >/dev/null; then
                _completion_loader "$name" >/dev/null 2>&1
            fi
        fi
        spec=$(complete -p "$name" 2>/dev/null)
        if [[ $spec =~ -F\ ([^ ]+) ]]; then
            other=${BASH_REMATCH[1]}
            [ "$other" != _ep_overlap_srun ] || continue
            printf -v "_ep_overlap_other_$name" %s "$other"
            eval "${spec/-F $other/-F _ep_overlap_srun}" # with its own -o
        else
            complete -o default -F _ep_overlap_srun "$name"
        fi
    done
}
_ep_overlap_srun_begin
