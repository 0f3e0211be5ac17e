# look NAME: what there is, in the workspace. Object directories the eldest first: git reads what
# each borrows from in turn, and gives up at the seventh link of a chain.

say root "$(pwd -P)"
common=$(git rev-parse --path-format=absolute --git-common-dir) || exit 22
common=$(cd "$common" && pwd -P) || exit 21
base=$(git rev-parse --verify --quiet 'HEAD^{commit}') || exit 23
[ "$(git rev-parse --is-shallow-repository)" = false ] || exit 24
export GIT_DIR="$common"
partial='^(extensions[.]partialclone|remote[.].*[.](promisor|partialclonefilter))$'
! git config --get-regexp "$partial" >/dev/null || exit 25
# -p, because another child may begin at the same moment
[ -d /workspace ] || mkdir -p /workspace || exit 26
for ref in "refs/heads/ctx/$1" refs/heads/ctx; do
    ! git show-ref --verify --quiet "$ref" || { say branch "${ref#refs/heads/}"; exit 27; }
done
if [ -e "$common/ctx/$1" ] || [ -L "$common/ctx/$1" ]; then
    say there "$common/ctx/$1"
    exit 27
fi
say common "$common"
say base "$base"
git count-objects -v | sed -n 's/^alternate: //p' | while IFS= read -r path; do
    say objects "$(cd "$path" && pwd -P)"
done
path=$(git rev-parse --path-format=absolute --git-path objects)
say objects "$(cd "$path" && pwd -P)"
hooks
say end
