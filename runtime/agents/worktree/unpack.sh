# unpack NAME BASE FORMAT: the directory at hand becomes a work tree of a repository, REPOSITORY, that
# is made of the pack on standard input, on a branch at BASE. Both may have what an earlier try left.

set -e
git=$REPOSITORY
find . "$git" -mindepth 1 -delete
mkdir -p "$git/hooks" "$git/info" "$git/objects/info" "$git/objects/pack" "$git/refs/heads/ctx"
git config --file "$git/config" core.bare false
if [ "$3" != sha1 ]; then
    git config --file "$git/config" core.repositoryFormatVersion 1
    git config --file "$git/config" extensions.objectFormat "$3"
fi
configure "$git/config"
printf 'ref: refs/heads/ctx/%s\n' "$1" >"$git/HEAD"
export GIT_DIR="$git" GIT_WORK_TREE="$PWD"
git index-pack --stdin --strict >/dev/null
printf '%s\n' "$2" >"$git/refs/heads/ctx/$1"
git reset --hard --quiet
printf 'gitdir: %s\n' "$git" >.git
say end
