# again PLACE REF: what a child goes on with that is placed elsewhere once more; send follows.

set -e
place=$1 git=$1/git
[ -d "$git" ] || exit 28
base=$(GIT_DIR=$git git rev-parse --verify "$2^{commit}")
say base "$base"
rm -rf "$place/copy"
