# What comes before all scripts here. A script says something in lines "=WORD VALUE", the last of
# them "=end"; what else it prints is git's, for people. workspace.py knows the exit statuses above
# 20, and runs the scripts in the cell of the parent (sh -c).

say() {
    case $2 in
    *[[:cntrl:]]*) echo "there are control characters in a path"; exit 21 ;;
    esac
    printf '=%s %s\n' "$1" "$2"
}
hooks() { # configured ones, which newer versions of git know
    git config --name-only --get-regexp '^hook[.]' | sed 's/^/=hook /'
}
