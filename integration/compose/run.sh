#!/usr/bin/env bash
# Tests docker-compose.yml with real containers. The script builds the images, starts all services, kills a NATS server and an
# indexer, queries the other indexers, restarts the killed services, and stops and removes all services. The script prints every
# step, and exits with a status above 0 at the first failed check.
#
# Without a running container engine, the script starts dockerd as root in a temporary folder. Without an installed engine, the
# script installs Debian's packages docker.io and docker-compose, which needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
project=kvatlas-$$
export KVATLAS_NATS_PORT= KVATLAS_HTTP_PORT= # the system selects free ports
engine=

say() { awk -v a="$(date +%s.%N)" -v b="$begun" -v w="$*" 'BEGIN { printf "%6.1f s  %s\n", a - b, w }'; }
begun=$(date +%s.%N)
fail() {
  say "FAILED: $*"
  compose ps || true
  compose logs --tail=40 || true
  exit 1
}
compose() { docker-compose -p "$project" "$@"; }

cleanup() {
  status=$?
  compose down -v --remove-orphans -t 5 >"$work/down.log" 2>&1 || cat "$work/down.log"
  if [ -n "$engine" ]; then
    kill "$engine" && wait "$engine" || true
  fi
  rm -rf "$work" || true
  exit $status
}
trap cleanup EXIT

if ! command -v dockerd >/dev/null && ! docker info >/dev/null 2>&1 || ! command -v docker-compose >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "needs docker and docker-compose (Debian: apt-get install docker.io docker-compose)" >&2
    exit 1
  fi
  say "installing docker.io and docker-compose"
  apt-get update -qq >"$work/apt.log" 2>&1 || true # old package lists may suffice
  apt-get install -qq -y --no-install-recommends docker.io docker-compose iptables >>"$work/apt.log" 2>&1 || { cat "$work/apt.log"; exit 1; }
fi
if ! docker info >/dev/null 2>&1; then
  say "starting a container engine"
  export DOCKER_HOST=unix://$work/docker.sock
  dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" >"$work/dockerd.log" 2>&1 &
  engine=$!
  for _ in $(seq 300); do
    docker info >/dev/null 2>&1 && break
    kill -0 "$engine" 2>/dev/null || { tail -20 "$work/dockerd.log"; exit 1; }
    sleep 0.2
  done
  docker info >/dev/null || { tail -20 "$work/dockerd.log"; exit 1; }
fi

# The function runs an indexer command in the container of a node: ask NODE WORDS...
ask() { compose exec -T "$1" /indexer "${@:2}"; }

# until_true SECONDS CHECK COMMAND... repeats a command until success, and fails after SECONDS.
until_true() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >"$work/last" 2>&1; do
    [ $SECONDS -lt $end ] || { cat "$work/last"; fail "$what"; }
    sleep 0.5
  done
  say "$what"
}

# All simulated conversations begin with the same 512 tokens. Every engine holds all 32 blocks of 16 tokens.
prompt=$(for b in $(seq 0 31); do for _ in $(seq 16); do printf '%d,' "$b"; done; done | sed 's/,$//')
holds_all() {
  local answer
  answer=$(ask "$1" query --json --model sim --tokens "$prompt") || { echo "$answer"; return 1; }
  echo "$answer"
  grep -q '"complete": true' <<<"$answer" && [ "$(grep -c '"device": 32' <<<"$answer")" = 2 ]
}
applied() { { ask "$1" status --node "$1" --json || true; } | sed -n 's/.*"blocks_applied": \([0-9]*\).*/\1/p'; }
grows() {
  local before=$2 now
  now=$(applied "$1") && echo "$now" && [ -n "$now" ] && [ "$now" -gt "$before" ]
}
healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$(compose ps -q "$1")")" = healthy ]; }

say "building the images"
make images >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
say "starting"
compose up -d >"$work/up.log" 2>&1 || { cat "$work/up.log"; fail "compose up"; }
for n in 1 2 3; do until_true 120 "indexer-$n is healthy" healthy indexer-$n; done
until_true 60 "both workers hold the complete prompt" holds_all indexer-1
for container in $(compose ps -q); do
  read -r name pid <<<"$(docker inspect -f '{{.Name}} {{.State.Pid}}' "$container")"
  has=$(awk '$1 ~ /^(Uid|CapEff|CapBnd|NoNewPrivs):$/ { printf "%s%s ", $1, $2 }' "/proc/$pid/status")
  [ "$has" = "Uid:65532 CapEff:0000000000000000 CapBnd:0000000000000000 NoNewPrivs:1 " ] || fail "$name has $has"
  [ "$(docker inspect -f '{{.HostConfig.ReadonlyRootfs}}' "$container")" = true ] || fail "$name writes to its root"
done
for n in 1 2; do
  mounted=$(docker inspect -f '{{range .Mounts}}{{.Source}}{{"\n"}}{{end}}' "$(compose ps -q shim-$n)" | grep keys/)
  [ "$(basename "$mounted")" = "default-shim-worker-$n.nk" ] || fail "shim-$n has the keys $mounted"
done
compose exec -T engine-1 /indexer probe http://indexer-1:8090/healthz >"$work/last" 2>&1 && fail "an engine can connect to an indexer"
compose exec -T -e NATS_NKEY= indexer-1 /indexer status >"$work/last" 2>&1 && fail "NATS accepts a client without a key"
grep -qi auth "$work/last" || { cat "$work/last"; fail "NATS returns no authentication error to a client without a key"; }
say "containers have no capabilities, and shims have only the key of their worker"

say "killing nats-2 and indexer-1"
docker kill "$(compose ps -q nats-2)" "$(compose ps -q indexer-1)" >/dev/null
until_true 60 "indexer-2 returns a complete answer" holds_all indexer-2
counted() { before=$(applied indexer-3) && [ -n "$before" ]; } # the command may first try the killed server
until_true 60 "indexer-3 reports the number of applied events" counted
until_true 60 "indexer-3 applies further events" grows indexer-3 "$before"

say "restarting nats-2 and indexer-1"
compose up -d >"$work/up.log" 2>&1 || { cat "$work/up.log"; fail "compose up"; }
until_true 120 "nats-2 is healthy" healthy nats-2
until_true 120 "indexer-1 is healthy" healthy indexer-1
until_true 60 "indexer-1 returns a complete answer" holds_all indexer-1
ask indexer-1 workers
say "stopping all services"
compose stop >"$work/stop.log" 2>&1 || fail "compose stop"
for s in indexer-1 indexer-2 indexer-3 shim-1 shim-2; do
  code=$(docker inspect -f '{{.State.ExitCode}}' "$(compose ps -aq $s 2>/dev/null || compose ps -q $s)")
  [ "$code" = 0 ] || fail "$s ended with $code"
done
say "all checks passed"
