# Completion of ctx(1) for bash: asks ctx what could come next.

# Files, whose names anybody may have chosen: readline quotes what a shell would obey.
_ctx_named() {
    local found
    compopt -o filenames
    mapfile -t found < <(compgen "$1" -- "$2")
    COMPREPLY+=("${found[@]}")
}

_ctx() {
    local line=${COMP_LINE:0:COMP_POINT} words=() current before word
    read -ra words <<< "$line"
    [[ $line == *[[:blank:]] ]] && words+=('')
    current=${words[${#words[@]} - 1]}
    # readline replaces only what follows the last = or : of the current word
    before=${current%"${current##*[=:]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        case $word in
        :files) _ctx_named -f "${current#"$before"}" ;;
        :directories) _ctx_named -d "${current#"$before"}" ;;
        :programs) _ctx_named -c "$current" ;;
        *) COMPREPLY+=("${word#"$before"}") ;;
        esac
    done < <("${words[0]}" __complete -- "${words[@]:1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
} 2> /dev/null

complete -F _ctx ctx
