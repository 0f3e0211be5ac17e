# receive PLACE REF COMMIT: what another machine says that the child committed, a pack on standard
# input, becomes the child's. Its objects are made alone, with bounded memory: a few bytes of a pack
# may stand for a very long object. What they refer to is judged by take.

got=$1/got
[ -d "$1" ] || exit 28
[ -d "$1/git" ] && [ -d "$1/work" ] && [ -f "$1/config" ] || exit 29
trap 'rm -rf "$got"' EXIT
rm -rf "$got"
mkdir -p "$got/info" "$got/pack" || exit 1
# shellcheck disable=SC3045
ulimit -v 2097152
(
    export GIT_DIR="$1/git" GIT_OBJECT_DIRECTORY="$got"
    git -c core.bigFileThreshold=16m index-pack --stdin >"$got/name"
) || exit 1
for kind in pack idx; do
    mv "$got"/pack/pack-*."$kind" "$1/git/objects/pack/" || exit 1
done
printf '%s\n' "$3" >"$1/git/$2" || exit 1
say end
