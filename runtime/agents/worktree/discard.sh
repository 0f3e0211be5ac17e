# discard NAME BASE: takes away what is there of one, and its branch if nothing was ever committed.

place=$GIT_DIR/ctx/$1 ref=refs/heads/ctx/$1
if [ -d "$place" ] && [ ! -L "$place" ]; then
    chmod -R u+rwX "$place" 2>/dev/null
    rm -rf "$place" || exit 1
fi
git config --get-regexp '^hook[.]' >/dev/null && exit 0
facts=$(git for-each-ref --format='%(objectname) [%(symref)] %(worktreepath)' "$ref")
# of a git that was killed
rm -f "$GIT_DIR/$ref.lock"
[ "$facts" != "$2 [] " ] || git update-ref --no-deref -d "$ref" "$2"
