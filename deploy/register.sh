#!/bin/sh
# Registers every public key of a folder at the SuperLink, which accepts only nodes with a registered key.
#   register.sh SUPERLINK ROOT_CERTIFICATE FOLDER
# It can be run repeatedly: keys stay registered.
set -eu

superlink=$1
certificate=$2
folder=$3

FLWR_HOME=$(mktemp -d)
export FLWR_HOME
trap 'rm -rf "$FLWR_HOME"' EXIT
cat >"$FLWR_HOME/config.toml" <<END
[superlink.link]
address = "$superlink"
root-certificates = "$certificate"
END

for key in "$folder"/*.pub; do
    [ -e "$key" ] || { echo "there is no public key in $folder" >&2; exit 1; }
    name=$(basename "$key" .pub)
    if answer=$(flwr supernode register "$key" link --name "$name" 2>&1); then
        echo "$name: registered"
    else
        case $answer in
            # Also if it was unregistered: Flower then rejects this key for good.
            *"already in use"*) echo "$name: was registered before (if it was unregistered since, it needs a new key)" ;;
            *)
                echo "$name: $answer" >&2
                exit 1
                ;;
        esac
    fi
done
