# again PLACE COMMIT: what a child goes on with that is placed elsewhere once more; send follows.

set -e
place=$1 base=$2 git=$1/git
[ -d "$git" ] || exit 28
rm -rf "$place/copy"
