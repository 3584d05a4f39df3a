#!/bin/sh
# Pins the images of others to what the registry has now: pulls each one, and writes NAME=IMAGE:TAG@DIGEST into .env,
# which docker-compose.yml and the build of deploy/Dockerfile use. A tag can be replaced in the registry; a digest
# is the checksum of the image itself.
#   deploy/images.sh            run it once, and again after an upgrade of this project
#   deploy/images.sh --check    pull nothing; exit code 1 names the images that .env does not pin
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "images.sh: $1" >&2
    exit 1
}

# NAME IMAGE:TAG, from ${NAME:-IMAGE:TAG}
list_images() { sed -n 's/.*\${\([A-Z]*_IMAGE\):-\([^}]*\)}.*/\1 \2/p' docker-compose.yml | sort -u; }

case ${1:-} in
    --check)
        missing=$(list_images | while read -r name image; do
            grep -q "^$name=$image@sha256:[0-9a-f]\{64\}\$" .env 2>/dev/null || printf ' %s' "$name"
        done)
        [ -z "$missing" ] || fail "not pinned to a digest in .env:$missing (run deploy/images.sh)"
        echo "all images are pinned to digests"
        exit 0
        ;;
    '') ;;
    *) fail "usage: deploy/images.sh [--check]" ;;
esac
command -v docker >/dev/null || fail "docker is not installed"

touch .env
trap 'rm -f .env.new' EXIT
grep -v '^[A-Z]*_IMAGE=' .env >.env.new || true
for name in $(list_images | cut -d' ' -f1); do
    image=$(list_images | sed -n "s/^$name //p")
    docker pull --quiet "$image" >/dev/null || fail "$image cannot be pulled"
    digest=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image" |
        sed -n 's/.*@\(sha256:[0-9a-f]\{64\}\)$/\1/p' | head -n 1)
    [ -n "$digest" ] || fail "$image has no digest: it was made on this machine, not pulled from a registry"
    echo "$name=$image@$digest" >>.env.new
    echo "$image@$digest"
done
cat .env.new >.env # keeps its mode and owner
