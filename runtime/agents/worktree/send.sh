# What follows make for a child that is placed elsewhere: all that its branch leads to, as a pack.

mkdir "$place/copy"
: >"$place/copy/refused"
(export GIT_DIR="$git"; echo "$base" | pack "$place/copy/pack") || exit
cat "$place/copy/pack" >&3
say bytes "$(wc -c <"$place/copy/pack")"
sum=$(sha256sum <"$place/copy/pack")
say digest "${sum%% *}"
rm "$place/copy/pack"
git config --file "$place/config" --list | sed 's/^/=config /'
