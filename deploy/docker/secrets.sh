#!/bin/sh
# Makes the secrets of docker-compose.yml in a folder: the token of HTTP, a key for the indexers and one for each shim,
# the NATS accounts that go with the keys, and the password of NATS servers among each other. It leaves the secrets that
# are there as they are.
#
#   deploy/docker/secrets.sh INDEXER FOLDER
#
# The containers' user is not the user of this host, and must read the files that are mounted for it. The folder
# therefore keeps other users of the host out, and the files in it can be read by everybody.
set -eu
indexer=$1
mkdir -p "$2"
chmod 700 "$2"
cd "$2"
umask 022

random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }

[ -s http-token ] || random >http-token
if [ ! -s routes.conf ]; then
  password=$(random)
  cat >routes.conf <<EOF
authorization { user: route, password: "$password" }
routes: [
  "nats://route:$password@nats-1:6222"
  "nats://route:$password@nats-2:6222"
  "nats://route:$password@nats-3:6222"
]
EOF
fi

if [ -s keys/roster.json ]; then
  "$indexer" auth print --keys keys >accounts.conf.new
else
  "$indexer" auth create --keys keys --shim worker-1 --shim worker-2 --model sim >accounts.conf.new
fi
mv accounts.conf.new accounts.conf
chmod 644 keys/default-node.nk keys/default-shim-*.nk
