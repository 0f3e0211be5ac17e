# receive PLACE REF COMMIT: what another machine says that the child committed, a pack on standard
# input, becomes the child's. Its objects are made alone; what they refer to is judged by take.

got=$1/got
[ -d "$1" ] || exit 28
[ -d "$1/git" ] && [ -d "$1/work" ] && [ -f "$1/config" ] || exit 29
trap 'rm -rf "$got"' EXIT
rm -rf "$got"
mkdir -p "$got/info" "$got/pack" || exit 1
(
    export GIT_DIR="$1/git" GIT_OBJECT_DIRECTORY="$got"
    git index-pack --stdin >"$got/name"
) || exit 1
for kind in pack idx; do
    mv "$got"/pack/pack-*."$kind" "$1/git/objects/pack/" || exit 1
done
printf '%s\n' "$3" >"$1/git/$2" || exit 1
say end
