# SPDX-License-Identifier: Apache-2.0
# bash completion of vhpc; `vhpc complete` says what may come next.
# shellcheck shell=bash

_vhpc() {
    local cur words cword word
    if declare -F _get_comp_words_by_ref >/dev/null; then
        _get_comp_words_by_ref -n := cur words cword
    else
        words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]}
    fi
    mapfile -t COMPREPLY < <(vhpc complete -- "${words[@]:1:cword}" 2>/dev/null)
    for word in "${COMPREPLY[@]}"; do
        # after JOBID: comes a path
        [[ $word != *: ]] || compopt -o nospace
    done
    ! declare -F __ltrim_colon_completions >/dev/null || __ltrim_colon_completions "$cur"
}
complete -o default -F _vhpc vhpc
