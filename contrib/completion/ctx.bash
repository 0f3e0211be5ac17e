# Completion of ctx(1) for bash: asks ctx what could come next.

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
        :files) compopt -o default; COMPREPLY+=($(compgen -f -- "${current#"$before"}")) ;;
        :directories) compopt -o filenames; COMPREPLY+=($(compgen -d -- "${current#"$before"}")) ;;
        :programs) COMPREPLY+=($(compgen -c -- "$current")) ;;
        *) COMPREPLY+=("${word#"$before"}") ;;
        esac
    done < <("${words[0]}" __complete -- "${words[@]:1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
} 2> /dev/null

complete -F _ctx ctx
