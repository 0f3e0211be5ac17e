# keep NAME BASE FORMAT PROGRAM [SETTLED...]: what an agent that has ended committed in REPOSITORY,
# whose work tree is the directory at hand, as a pack of what BASE does not lead to; judge follows. No
# file that the agent may have left there is obeyed.

work=$PWD repo=$REPOSITORY ours=$REPOSITORY/ctxfs base=$2 program=$4
ref=refs/heads/ctx/$1 copied=$REPOSITORY/ctxfs/none below=$REPOSITORY/ctx
keep() { say kept "$1"; say end; exit 0; }
trap 'rm -rf "$ours"' EXIT
rm -rf "$ours" || exit 1
mkdir -p "$ours/objects/info" "$ours/objects/pack" "$ours/refs/heads" || exit 1
git config --file "$ours/config" core.bare false
[ "$3" = sha1 ] || {
    git config --file "$ours/config" core.repositoryFormatVersion 1
    git config --file "$ours/config" extensions.objectFormat "$3"
}
configure "$ours/config"
printf 'ref: refs/heads/none\n' >"$ours/HEAD"
commit=$("$program" "$repo" "$ref" "$ours/objects")
case $? in
0) ;;
3) keep "it has no branch ${ref#refs/heads/} any more" ;;
*) exit 1 ;;
esac
shift 4
export GIT_DIR="$ours"
objects=$ours/objects
git cat-file --batch-all-objects --unordered --batch-check='%(objecttype) %(objectname)' \
    >"$ours/all" || keep "its objects cannot be read"
sed -n 's/^commit //p' "$ours/all" >"$ours/commits"
printf '%s\n' "$base" >"$ours/refs/heads/base"
if [ "$commit" != "$base" ]; then
    printf '%s\n' "$commit" "^$base" | pack "$ours/pack"
    case $? in
    0) ;;
    31) keep "what it committed is a pack of more than $MOST bytes (artifact_max)" ;;
    *) keep "its objects are missing, or do not match their names" ;;
    esac
    cat "$ours/pack" >&3 || exit 1
    say bytes "$(wc -c <"$ours/pack")"
fi
say commit "$commit"
