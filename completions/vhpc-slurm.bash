# SPDX-License-Identifier: Apache-2.0
# bash completion of --vhpc-image= for sbatch, salloc and srun, beside Slurm's own completion.
# shellcheck shell=bash
#
# To be read when a shell starts, after Slurm's slurm_completion.sh if that is, too.  Slurm's function for
# the command is called for everything but the value of --vhpc-image; it is loaded when it is needed first.

declare -gA _vhpc_slurm_function

# Find Slurm's function for a command, load it if bash-completion can, and take its place again.
_vhpc_slurm_find() {
    local shown
    _vhpc_slurm_function[$1]=
    shown=$(complete -p "$1" 2>/dev/null)
    if [[ $2 == load && ( -z $shown || $shown == *_vhpc_slurm_image* ) ]]; then
        complete -r "$1" 2>/dev/null
        if declare -F _comp_load >/dev/null; then
            _comp_load "$1"
        elif declare -F _completion_loader >/dev/null; then
            _completion_loader "$1"
        fi
        shown=$(complete -p "$1" 2>/dev/null)
    fi
    if [[ $shown =~ \ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _vhpc_slurm_image && ${BASH_REMATCH[1]} != *_minimal ]]; then
        _vhpc_slurm_function[$1]=${BASH_REMATCH[1]}
    elif [[ $2 == load ]]; then
        _vhpc_slurm_function[$1]=none
    fi
    complete -o default -o nospace -F _vhpc_slurm_image "$1"
}

_vhpc_slurm_image() {
    local cur=${COMP_WORDS[COMP_CWORD]} word='' name i
    # the word from its last blank on: bash divides --vhpc-image=NAME:TAG at = and :
    for ((i = COMP_CWORD; i > 0; i--)); do
        word=${COMP_WORDS[i]}$word
        [[ ${COMP_WORDS[i]} == -* ]] && break
    done
    if [[ $word == --vhpc-image=* ]]; then
        word=${word#--vhpc-image=}
        COMPREPLY=()
        while read -r name; do
            # bash replaces only what follows the last : or =
            [[ $name != "$word"* ]] || COMPREPLY+=("${name#"${word%"${word##*:}"}"}")
        done < <(echo list; vhpc image names 2>/dev/null)
        compopt +o nospace 2>/dev/null
        return 0
    fi
    [[ -n ${_vhpc_slurm_function[$1]-} ]] || _vhpc_slurm_find "$1" load
    if [[ ${_vhpc_slurm_function[$1]} != none ]]; then
        "${_vhpc_slurm_function[$1]}" "$@"
    else
        compopt +o nospace 2>/dev/null
    fi
    if [[ $cur == -* && --vhpc-image= == "$cur"* ]]; then
        COMPREPLY+=("--vhpc-image=")
        compopt -o nospace 2>/dev/null
    fi
}

for _vhpc_command in sbatch salloc srun; do
    _vhpc_slurm_find "$_vhpc_command" now
done
unset _vhpc_command
