#!/bin/sh
# secrets.sh creates the secrets of docker-compose.yml in a folder: the token of HTTP, a key for the indexers, a key per
# shim, the NATS accounts of the keys, and the password between NATS servers. Existing secrets stay.
#
#   deploy/docker/secrets.sh INDEXER FOLDER
#
# The user of the containers differs from the user of the host, and must read the mounted files. So all users may read
# the files, but only the owner may enter the folder.
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
