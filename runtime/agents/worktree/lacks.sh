# lacks PLACE BASE COMMON: in what the child's files and repository differ from its parent's, whose
# workspace this is run in. What is told of each is in a file of its own, one name a line.

place=$1 base=$2 common=$3 copy=$1/copy told=$1/copy/told
lines() { tr '\n\0' ' \n'; }

mkdir "$told" || exit 1
[ ! -f "$copy/copied" ] || lines <"$copy/copied" >"$told/copied"
(
    look_at_parent "$place" "$common" || exit 0
    ignoring status -z --ignored --no-renames --ignore-submodules=all -- . >"$copy/status" || exit 1
    lines <"$copy/status" >"$copy/changes"
    cp "$copy/refused" "$told/not_copied"
    : >>"$copy/matched" # no list, no patterns
    lines <"$copy/matched" >"$copy/patterns"
    sed -n 's/^!! //p' "$copy/changes" | grep -aFxvf "$copy/patterns" >>"$told/not_copied"
    sed -n 's/^?? //p; s/^[^!?]. //p' "$copy/changes" >"$told/uncommitted"
) || exit 1

export GIT_DIR="$common"
git for-each-ref --format='%(refname:short)' refs/heads refs/tags refs/remotes |
    grep -av '^ctx/' >"$told/refs_left_out"
git config --local --name-only --list >"$copy/keys"
sed 's/[.].*//' "$copy/keys" | sort -u | grep -avxE \
    'annex|branch|core|extensions|filter|gc|hook|i18n|lfs|maintenance|pack|submodule|user' \
    >"$told/config_left_out"
path=$(unset GIT_CONFIG_COUNT; git config --type=path core.hooksPath) || path=$common/hooks
[ "${path#/}" != "$path" ] || path=$(unset GIT_DIR; git rev-parse --show-toplevel)/$path
{
    for hook in applypatch-msg commit-msg post-applypatch post-checkout post-commit \
        post-index-change post-merge post-rewrite pre-applypatch pre-auto-gc pre-commit \
        pre-merge-commit pre-push pre-rebase prepare-commit-msg reference-transaction; do
        [ ! -f "$path/$hook" ] || [ ! -x "$path/$hook" ] || echo "$hook"
    done
    grep -a '^hook[.].*[.]command$' "$copy/keys"
} >"$told/hooks_not_run"

cd "$place/work" || exit 1
export GIT_DIR="$place/git" GIT_WORK_TREE="$place/work"
git ls-tree -r -z "$base" | lines >"$copy/tree"
sed -n 's/^160000 [^\t]*\t//p' "$copy/tree" >"$told/empty_submodules"
if grep -aq '[/	][.]gitattributes$' "$copy/tree" || [ -f "$common/info/attributes" ]; then
    git ls-files | git -c core.attributesFile="$common/info/attributes" check-attr --stdin filter |
        sed 's/.*: filter: //' | grep -avxE 'unspecified|unset|set' | sort | uniq -c |
        sed 's/^ *\([0-9]*\) \(.*\)/\2 (\1)/' >"$told/filters_not_run"
fi
if grep -aq '^120000 ' "$copy/tree"; then
    find . -type l \( -lname '.git/*' -o -lname '*/.git/*' \) -printf '%P\0' |
        lines >"$told/links_into_git"
fi
cd "$told" || exit 1
grep -aH -m 16 '' -- * | cut -b -240 | sed 's/^/=told /'
grep -acH '' -- * | sed 's/^/=count /'
rm -rf "$copy"
say end
