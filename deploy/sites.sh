#!/bin/sh
# Sets up a deployment with N sites instead of three: a compose file, and the keys that are missing.
#   deploy/sites.sh [--gpu] [--only SITE|server] N [HOST ...]       then the command that it prints
#
# HOST is as for keys.sh. The script writes docker-compose.sites.yml, a copy of docker-compose.yml in which the
# services, networks and volumes of site 0 are repeated for each site, and sets SITES and COMPOSE_FILE in .env, so that
# `docker compose` uses it. Each site has its own networks, key, data and state. Run it again after docker-compose.yml changes.
#
# For a site on another machine, `--only` with its number (from 0) writes the services of that site, and makes no keys.
# For the server of such sites, `--only server` writes those of the server. Docker has about 30 networks by default;
# each site uses two.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "sites.sh: $1" >&2
    exit 1
}

gpu=
only=
while :; do
    case ${1:-} in
        --gpu) gpu=yes ;;
        --only)
            [ $# -gt 1 ] || fail "--only needs a value"
            only=$2
            shift
            ;;
        *) break ;;
    esac
    shift
done
sites=${1:-}
case $sites in
    '' | *[!0-9]* | 0*) fail "usage: deploy/sites.sh [--gpu] [--only SITE|server] N [HOST ...]; N is '$sites', expected a number from 1" ;;
esac
shift
case $only in
    '') first=0 end=$sites ;;
    server) first=0 end=0 ;;
    *[!0-9]* | 0?*) fail "--only is '$only', expected server or the number of a site" ;;
    *)
        [ "$only" -lt "$sites" ] || fail "--only is $only, but the last of $sites sites is $((sites - 1))"
        first=$only end=$((only + 1))
        ;;
esac

# Repeats the parts of a site: a service with all its lines, or one line of a list or mapping. For one site alone, the
# services of the server are left out, and what waits for them.
repeat() {
    awk -v first="$first" -v end="$end" -v alone="${only#server}" '
        function site(text, i) {
            gsub(/-0/, "-" i, text); gsub(/_0/, "_" i, text); gsub(/partition-id=0/, "partition-id=" i, text)
            return text
        }
        function flush(  i) {
            if (block != "") for (i = first; i < end; i++) printf "%s", site(block, i)
            block = ""
        }
        /^[^ ]/ { services = /^services:/; dropped = 0 }
        /^[^ ]/ || /^  [^ ]/ { inside = 0 }
        /^  [^ ]/ { dropped = alone != "" && (services || /^  depends_on:/) }
        /^  (supernode|superexec-clientapp|check)-[0-9]+:/ { inside = 1; mine = /-0:/ }
        inside { if (mine) block = block $0 "\n"; next }
        dropped { next }
        /^ +(- )?(state|site|exchange)-[0-9]+(-[a-z]+|\$.*)?(:.*)?$/ {
            if (/^ +(- )?[a-z]+-0/) for (i = first; i < end; i++) print site($0, i)
            next
        }
        { flush(); print }
        END { flush() }
    ' "$1"
}

# Keys are created where they are missing, and for new hosts; otherwise the authority's key may be offline.
keys=deploy/keys
missing=$*
if [ -n "${only#server}" ]; then
    [ $# = 0 ] || fail "--only $only: a site makes no keys, so it needs no HOST"
else
    [ -e "$keys/superlink/server.pem" ] && [ -e "$keys/exchange/server.pem" ] || missing="server $missing"
    i=0
    while [ "$i" -lt "$sites" ]; do
        [ -e "$keys/site-$i/node.key" ] || [ -e "$keys/nodes/node-$i.pub" ] || missing="$missing site-$i"
        i=$((i + 1))
    done
fi
if [ -n "$missing" ] && [ ! -e "$keys/ca/ca.key" ] && [ -n "$(ls -A "$keys" 2>/dev/null)" ]; then
    fail "keys are to be made (for $missing), and $keys/ca/ca.key is not here; copy $keys/ca back from where it is stored"
fi

files=docker-compose.sites.yml
{
    echo "# Written by deploy/sites.sh for $sites sites; changes are lost when it runs again."
    repeat docker-compose.yml | sed "s/\${SITES:-3}/\${SITES:-$sites}/"
} >docker-compose.sites.yml
if [ -n "$gpu" ]; then
    repeat docker-compose.gpu.yml >docker-compose.sites.gpu.yml
    files=$files:docker-compose.sites.gpu.yml
fi

renew=
if [ -n "${only#server}" ]; then
    [ -e "$keys/site-$only/node.key" ] || echo "copy $keys/site-$only from the server"
elif [ -z "$missing" ]; then
    echo "$keys has the keys of all $sites sites"
elif [ -e "$keys/ca/ca.key" ]; then
    deploy/keys.sh --add --nodes "$sites" "$@"
    renew=" --force-recreate" # a running server has its earlier certificate
else
    deploy/keys.sh --nodes "$sites" "$@"
fi

touch .env
{
    grep -v -e '^SITES=' -e '^COMPOSE_FILE=' .env || true
    echo "SITES=$sites"
    echo "COMPOSE_FILE=$files"
} >.env.new
cat .env.new >.env # keeps its mode and owner
rm .env.new
if [ -n "${only#server}" ]; then
    echo "for site $only: docker compose up --build --detach"
    exit
fi
left=
for key in "$keys"/nodes/node-*.pub; do
    number=${key##*/node-}
    [ "${number%.pub}" -lt "$sites" ] || left="$left ${number%.pub}"
done
[ -z "$left" ] ||
    echo "nodes with the keys of other sites stay registered:$left (docs/operations.md, \"Add, remove or replace a site\")"
[ -n "$only" ] ||
    echo "for $sites sites on this machine: docker compose up --build --detach$renew --remove-orphans"
echo "for sites elsewhere:             docker compose up --build --detach$renew superlink register superexec-serverapp proxy"
