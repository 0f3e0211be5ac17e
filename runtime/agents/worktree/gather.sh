# gather PLACE REF PROGRAM: brings the child's objects where ours looks for them.

[ -d "$1" ] || exit 28
[ -d "$1/git" ] && [ -d "$1/work" ] && [ -f "$1/config" ] || exit 29
rm -rf "$1/fetch"
mkdir -p "$1/fetch/objects/info" "$1/fetch/refs" || exit 1
commit=$("$3" "$1/git" "$2" "$1/fetch/objects")
case $? in
0) ;;
3) exit 30 ;;
126 | 127) exit 127 ;;
*) exit 1 ;;
esac
say commit "$commit"
hooks
say end
