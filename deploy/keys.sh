#!/bin/sh
# Creates all keys that docker-compose.yml needs: a certificate authority, the certificates of the SuperLink and of the
# exchange service, and one key pair per SuperNode. Needs openssl and ssh-keygen, and no network.
#
# Each folder below is for one party only:
#   ca/         key that signs server certificates; no container mounts it, so it may be stored offline
#   superlink/  server certificate and its key
#   exchange/   certificate and key of the exchange service, which the ServerApp opens (FedTAN)
#   nodes/      public keys of the nodes, to be registered at the SuperLink
#   site-<i>/   private key of node i, and the certificate with which it verifies the SuperLink
#   ca.crt      for users who submit runs
set -eu

usage() {
    cat <<'END'
usage: deploy/keys.sh [--out FOLDER] [--nodes N] [--add | --force | --check] [HOST ...]

  HOST         another name or IP address of the server; the services' names in
               docker-compose.yml, localhost and 127.0.0.1 are always included
  --out        output folder (deploy/keys)
  --nodes      number of SuperNodes ($SITES, else 3)
  --add        keep the authority and the existing nodes; create missing keys, and new server
               certificates for the previous hosts and the given ones (for more sites, another
               host name, or before the certificates expire)
  --force      replace everything: sites with an old key are locked out
  --check      create nothing; exit code 1 if other users of this machine can read a private key,
               the containers can't read one, or a certificate has expired
END
}

fail() {
    echo "keys.sh: $1" >&2
    exit 1
}

out=$(dirname "$0")/keys
nodes=${SITES:-3}
mode=new
hosts="localhost 127.0.0.1"
while [ $# -gt 0 ]; do
    case $1 in
        --out | --nodes)
            [ $# -gt 1 ] || fail "$1 needs a value"
            if [ "$1" = --out ]; then out=$2; else nodes=$2; fi
            shift
            ;;
        --add) mode=add ;;
        --check) mode=check ;;
        --force) mode=force ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*) fail "unknown option $1 (see --help)" ;;
        # Host names become lines of OpenSSL's configuration below.
        '' | *[!A-Za-z0-9.:_-]*) fail "'$1' is neither a host name nor an IP address" ;;
        *) hosts="$hosts $1" ;;
    esac
    shift
done
case $nodes in
    '' | *[!0-9]* | 0) fail "--nodes is '$nodes', expected a number from 1" ;;
esac

# Whether group or others have a permission on a file or folder; $2 is its octal digit.
has_mode() { [ -n "$(find "$1" -prune \( -perm -0"$2"0 -o -perm -00"$2" \))" ]; }

# Fails if other users can read a private key: its mode, its folder's mode and the mode of $out all permit it.
refuse_open_keys() {
    has_mode "$out" 1 || return 0
    for key in "$out"/*/*.key; do
        [ -e "$key" ] || continue
        if has_mode "$key" 4 && has_mode "$(dirname "$key")" 1; then
            fail "$key is readable by others; chmod 700 $out (if root created it: $(dirname "$key")), and find out who has read it"
        fi
    done
}
if [ "$mode" = check ]; then
    [ -d "$out" ] || fail "$out does not exist"
    refuse_open_keys
    echo "no private key in $out is readable by others"
    worst=0
    for key in "$out"/superlink/*.key "$out"/exchange/*.key "$out"/site-*/node.key; do
        [ -e "$key" ] || continue
        if [ -z "$(find "$key" -prune \( -uid 49999 -perm -0400 -o -perm -0004 \))" ]; then
            echo "$key: the containers, which run as uid 49999, cannot read it; chown -R 49999:49999 $(dirname "$key")"
            worst=1
        fi
    done
    # As `fedbn check` does for the certificates that a site uses: a warning in the last 30 days.
    command -v openssl >/dev/null || fail "openssl is not installed; certificates were not checked"
    for certificate in "$out"/ca.crt "$out"/*/ca.crt "$out"/*/server.pem; do
        [ -r "$certificate" ] || continue
        end=$(openssl x509 -in "$certificate" -noout -enddate) || fail "$certificate is not a certificate"
        if ! openssl x509 -in "$certificate" -noout -checkend 0 >/dev/null; then
            echo "$certificate: EXPIRED on ${end#*=}"
            worst=1
        elif ! openssl x509 -in "$certificate" -noout -checkend 2592000 >/dev/null; then
            case $certificate in
                */ca.crt) cure="--force creates another authority and other keys, which all sites and users need" ;;
                *) cure="renew it with --add --nodes N, then: docker compose restart proxy, and between two runs superlink superexec-serverapp" ;;
            esac
            echo "$certificate: expires within 30 days, on ${end#*=}; $cure"
        else
            echo "$certificate: valid until ${end#*=}"
        fi
    done
    exit $worst
fi
[ "$mode" != add ] || refuse_open_keys

for tool in openssl ssh-keygen; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
done
if [ "$mode" = new ] && [ -e "$out" ] && [ -n "$(ls -A "$out")" ]; then
    fail "$out holds keys already; --add keeps and completes them, --force replaces them all"
fi
[ "$mode" != add ] || [ -e "$out/ca/ca.key" ] || fail "--add: $out/ca/ca.key does not exist"

if [ "$mode" = add ] && [ -e "$out/superlink/server.pem" ]; then
    # A new certificate keeps the names that sites use. Those of the services are added below.
    for host in $(openssl x509 -in "$out/superlink/server.pem" -noout -ext subjectAltName |
        sed -n -e 's/IP Address:/DNS:/g' -e 's/[[:space:]]*DNS:\([^,]*\),*/\1 /gp'); do
        case " $hosts superlink " in
            *" $host "*) ;;
            *) hosts="$hosts $host" ;;
        esac
    done
fi

umask 077
mkdir -p "$out"
if [ "$mode" = force ]; then
    # By name, so that a mistyped --out deletes nothing else.
    rm -rf "$out/ca" "$out/ca.crt" "$out/superlink" "$out/exchange" "$out/nodes" "$out"/site-[0-9]*
fi
mkdir -p "$out/ca" "$out/superlink" "$out/exchange" "$out/nodes"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The names of a certificate, as lines of OpenSSL's configuration.
list_names() {
    dns=0
    ip=0
    for host in "$@"; do
        case $host in
            *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*)
                ip=$((ip + 1))
                echo "IP.$ip = $host"
                ;;
            *)
                dns=$((dns + 1))
                echo "DNS.$dns = $host"
                ;;
        esac
    done
}
# Strict verifiers (Python 3.13 and later) require key usage and both key identifiers.
cat >"$work/openssl.cnf" <<END
[req]
prompt = no
distinguished_name = name
[name]
CN = \${ENV::CN}
[ca]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = @hosts
[hosts]
END

new_key() { openssl ecparam -name secp384r1 -genkey -noout -out "$1"; }

if [ "$mode" != add ]; then
    new_key "$out/ca/ca.key"
    CN="fedbn deployment CA" openssl req -x509 -new -sha384 -days 3650 -config "$work/openssl.cnf" -extensions ca \
        -key "$out/ca/ca.key" -out "$out/ca/ca.crt"
fi

# Two keys: the ServerApp runs code of the users who submit runs, which must not have access to the SuperLink's key.
for server in superlink exchange; do
    own=superlink
    [ $server = superlink ] || own=superexec-serverapp
    cp "$work/openssl.cnf" "$work/$server.cnf"
    # shellcheck disable=SC2086 # a list of words
    list_names $own $hosts >>"$work/$server.cnf"
    new_key "$work/server.key"
    CN=$server openssl req -new -sha384 -config "$work/$server.cnf" -key "$work/server.key" -out "$work/server.csr"
    # Not -CAcreateserial: a random serial number needs no file for the last one.
    CN=$server openssl x509 -req -sha384 -days 825 -in "$work/server.csr" -CA "$out/ca/ca.crt" \
        -CAkey "$out/ca/ca.key" -set_serial "0x$(openssl rand -hex 16 | sed 's/^[89a-f]/1/')" \
        -extfile "$work/$server.cnf" -extensions server -out "$work/server.pem" 2>"$work/log" ||
        fail "$(cat "$work/log")"
    mv -f "$work/server.key" "$work/server.pem" "$out/$server/"
    cp -f "$out/ca/ca.crt" "$out/$server/ca.crt"
done
cp -f "$out/ca/ca.crt" "$out/nodes/ca.crt"
cp -f "$out/ca/ca.crt" "$out/ca.crt"

i=0
while [ "$i" -lt "$nodes" ]; do
    site=$out/site-$i
    # If only the public key is here, the private key is at its site: a new pair would lock that site out.
    if [ ! -e "$site/node.key" ] && [ ! -e "$out/nodes/node-$i.pub" ]; then
        mkdir -p "$site"
        ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$site/node.key"
        mv "$site/node.key.pub" "$out/nodes/node-$i.pub"
        cp "$out/ca/ca.crt" "$site/ca.crt"
        new="${new:-} site-$i"
    fi
    i=$((i + 1))
done

# The containers run as uid 49999. If root runs this script, that user gets the files, and the folders are closed to
# all others. Other users cannot change the owner: the files stay readable, and the folder above is closed instead. No
# other user of this machine can pass it, but a container mounts the folder inside it.
for folder in "$out/superlink" "$out/exchange" "$out/nodes" "$out"/site-[0-9]*; do
    [ -d "$folder" ] || continue # all sites have theirs
    if [ "$(id -u)" = 0 ]; then
        chown -R 49999:49999 "$folder"
    else
        chmod 755 "$folder"
        chmod 644 "$folder"/*
    fi
done
if [ "$(id -u)" = 0 ]; then
    chmod 755 "$out"
    chmod 644 "$out/ca.crt"
fi
refuse_open_keys
[ -z "${new:-}" ] || echo "new keys:$new"
echo "keys for $nodes nodes and a server at:$(printf ' %s' $hosts) are in $out"
