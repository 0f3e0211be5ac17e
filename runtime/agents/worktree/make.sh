# make NAME BASE ZERO FORMAT OBJECTS...: makes one. Files of submodules and of filters are not had.

set -e
name=$1 base=$2 zero=$3 format=$4
shift 4
place=$GIT_DIR/ctx/$name
git=$place/git
mkdir -p "$GIT_DIR/ctx"
mkdir "$place"
git update-ref --no-deref "refs/heads/ctx/$name" "$base" "$zero"
mkdir -p "$place/work" "$git/hooks" "$git/info" "$git/objects/info" "$git/objects/pack" \
    "$git/refs/heads/ctx" "$git/ctx"
put() { git config --file "$place/config" "$1" "$2"; }
put core.bare false
# that would be below info, which is not its to write
put repack.updateServerInfo false
if [ "$format" = sha1 ]; then
    put core.repositoryFormatVersion 0
else
    put core.repositoryFormatVersion 1
    put extensions.objectFormat "$format"
fi
for key in user.name user.email core.autocrlf core.eol core.safecrlf core.symlinks \
    core.ignoreCase core.precomposeUnicode i18n.commitEncoding; do
    if value=$(git config --get "$key"); then put "$key" "$value"; fi
done
cp "$place/config" "$git/config"
printf '%s\n' "$@" >"$git/objects/info/alternates"
printf 'ref: refs/heads/ctx/%s\n' "$name" >"$git/HEAD"
printf '%s\n' "$base" >"$git/refs/heads/ctx/$name"
printf 'gitdir: %s\n' "$GIT_DIR/ctx" >"$place/dotgit"
# in the child's view the line above; here nothing, so that git does not begin to work
: >"$place/work/.git"
cd "$place/work"
if [ -n "$FAR" ]; then # its files are elsewhere
    GIT_DIR=$git git read-tree "$base"
else
    GIT_DIR=$git GIT_WORK_TREE=$place/work git reset --hard --quiet
fi
