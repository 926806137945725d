#!/bin/bash
# cluster.sh FOLDER NODES runs a Kubernetes of real programs on the local machine until a signal. FOLDER has all files.
# PATH has the programs, which fetch/main.go has built and installed.
#
# The caller starts the script in new mount, process and network namespaces:
#
#   unshare --mount --propagation private --net --pid --fork --kill-child --mount-proc cluster.sh FOLDER NODES
#
# The end of the script therefore ends every process, mount and network of the cluster. Only empty cgroups below
# /kvatlas-kube remain, until the next start. The control plane is 10.77.0.1, node N is 10.77.0.(10+N), and the pods of
# node N have addresses in 10.244.N.0/24. The network namespace of the script has routes to all addresses.
#
# Every node imports FOLDER/images/*.tar. pause.tar has the image localhost/pause:1. The script creates the file
# FOLDER/ready after all nodes are ready. FOLDER/pki/admin.conf is the administrator's kubeconfig.
set -euo pipefail
dir=$1
net=10.77.0
pki=$dir/pki

kubectl() { kube kubectl --kubeconfig "$pki/admin.conf" "$@"; }

# start NAME COMMAND... runs a command in the background with output to log/NAME. The end of the command ends the cluster.
start() {
	local name=$1
	shift
	{
		"$@" </dev/null >"$dir/log/$name" 2>&1 || true
		echo "cluster.sh: $name has ended; see $dir/log/$name" >&2
		kill 1
	} &
}

wait_for() { # wait_for SECONDS NAME COMMAND... repeats a command until success
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		((SECONDS < end)) || {
			echo "cluster.sh: timeout while waiting for $what" >&2
			return 1
		}
		sleep 0.3
	done
}

authority() { # authority NAME SUBJECT creates a self-signed certificate authority in the folder pki
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -keyout "$pki/$1.key" \
		-out "$pki/$1.crt" -subj "$2" 2>/dev/null
}

cert() { # cert NAME SUBJECT [ALTERNATIVE_NAMES] [AUTHORITY] creates a key and a certificate; the default authority is ca
	local by=$pki/${4-ca}
	openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$pki/$1.key" -subj "$2" 2>/dev/null |
		openssl x509 -req -CA "$by.crt" -CAkey "$by.key" -CAcreateserial -days 30 -out "$pki/$1.crt" 2>/dev/null \
			-extfile <(echo "extendedKeyUsage=clientAuth,serverAuth"; [ -z "${3-}" ] || echo "subjectAltName=$3")
}

config() { # config NAME writes a kubeconfig with the certificate NAME
	cat >"$pki/$1.conf" <<-Y
	apiVersion: v1
	kind: Config
	clusters: [{name: judge, cluster: {server: "https://$net.1:6443", certificate-authority: $pki/ca.crt}}]
	users: [{name: me, user: {client-certificate: $pki/$1.crt, client-key: $pki/$1.key}}]
	contexts: [{name: judge, context: {cluster: judge, user: me}}]
	current-context: judge
	Y
	chmod 600 "$pki/$1.conf"
}

user() { # user NAME SUBJECT creates a certificate and a kubeconfig for a user of the cluster
	cert "$1" "$2"
	config "$1"
}

# control_plane creates all certificates, starts etcd and the programs of the control plane, and creates the roles.
control_plane() {
	authority ca /CN=kvatlas-kube
	authority front-proxy-ca /CN=kvatlas-kube-front-proxy
	openssl genrsa -out "$pki/sa.key" 2048 2>/dev/null
	openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub" 2>/dev/null
	local names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc
	cert apiserver /CN=kube-apiserver "IP:$net.1,IP:127.0.0.1,IP:10.96.0.1,$names"
	cert front-proxy /CN=front-proxy-client "" front-proxy-ca
	user admin /O=system:masters/CN=admin
	user controllers /CN=system:kube-controller-manager
	user scheduler /CN=system:kube-scheduler
	user proxy /CN=system:kube-proxy
	user policies /CN=judge:policies

	start etcd kube etcd --name judge --data-dir "$dir/etcd" --unsafe-no-fsync --log-level warn \
		--listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
		--listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
		--initial-cluster judge=http://127.0.0.1:2380
	# Without --kubelet-preferred-address-types, logs and exec resolve the names of nodes in DNS. Addresses of services do
	# not work on the control plane. With --enable-aggregator-routing, the API server connects to the pods of an APIService.
	start kube-apiserver kube kube-apiserver --etcd-servers http://127.0.0.1:2379 \
		--bind-address 0.0.0.0 --advertise-address $net.1 --secure-port 6443 \
		--tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" \
		--client-ca-file "$pki/ca.crt" \
		--kubelet-client-certificate "$pki/admin.crt" --kubelet-client-key "$pki/admin.key" \
		--authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction \
		--service-account-issuer https://kubernetes.default.svc --service-account-key-file "$pki/sa.pub" \
		--service-account-signing-key-file "$pki/sa.key" --service-cluster-ip-range 10.96.0.0/16 --allow-privileged \
		--kubelet-preferred-address-types InternalIP --enable-aggregator-routing=true \
		--requestheader-client-ca-file "$pki/front-proxy-ca.crt" --requestheader-allowed-names front-proxy-client \
		--requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
		--requestheader-extra-headers-prefix X-Remote-Extra- \
		--proxy-client-cert-file "$pki/front-proxy.crt" --proxy-client-key-file "$pki/front-proxy.key"
	wait_for 120 "the API server" kubectl get --raw /readyz
	start kube-controller-manager kube kube-controller-manager --kubeconfig "$pki/controllers.conf" \
		--bind-address 127.0.0.1 --use-service-account-credentials --service-account-private-key-file "$pki/sa.key" \
		--root-ca-file "$pki/ca.crt" --cluster-signing-cert-file "$pki/ca.crt" --cluster-signing-key-file "$pki/ca.key" \
		--allocate-node-cidrs=false --leader-elect=false --horizontal-pod-autoscaler-sync-period 1s \
		--authentication-kubeconfig "$pki/controllers.conf" --authorization-kubeconfig "$pki/controllers.conf"
	start kube-scheduler kube kube-scheduler --kubeconfig "$pki/scheduler.conf" --bind-address 127.0.0.1 \
		--leader-elect=false --authentication-kubeconfig "$pki/scheduler.conf" \
		--authorization-kubeconfig "$pki/scheduler.conf"
	kubectl create clusterrolebinding judge:proxy --clusterrole=system:node-proxier --user=system:kube-proxy
	kubectl create clusterrole judge:policies --verb=get,list,watch --resource=namespaces,pods,services,nodes,endpoints \
		--resource=networkpolicies.networking.k8s.io,endpointslices.discovery.k8s.io
	kubectl create clusterrolebinding judge:policies --clusterrole=judge:policies --user=judge:policies
}

# node N writes the settings of a node and runs node_init in namespaces of the node.
node() {
	local n=$1 d=$dir/n$1 name=node$1
	mkdir -p "$d"/{containerd,state,kubelet,cni,varlog,containers}
	cert "$name" "/O=system:nodes/CN=system:node:$name" "DNS:$name,IP:$net.$((10 + n))"
	config "$name"
	# Root has no CAP_SYS_RESOURCE on some machines. Without the capability, runc cannot lower an OOM score and fails.
	# containerd 1 and 2 read settings of version 2.
	cat >"$d/containerd.toml" <<-T
	version = 2
	root = "$d/containerd"
	state = "$d/state"
	disabled_plugins = ["io.containerd.internal.v1.opt"]
	[grpc]
	  address = "$d/containerd.sock"
	[plugins."io.containerd.grpc.v1.cri"]
	  sandbox_image = "localhost/pause:1"
	  restrict_oom_score_adj = true
	[plugins."io.containerd.grpc.v1.cri".cni]
	  bin_dir = "/usr/lib/cni"
	  conf_dir = "$d/cni"
	[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
	  runtime_type = "io.containerd.runc.v2"
	  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
	    BinaryName = "runc"
	    SystemdCgroup = false
	T
	# With ptp, pods of the same node communicate through layer 3, where services and policies apply.
	cat >"$d/cni/10-judge.conflist" <<-C
	{"cniVersion": "1.0.0", "name": "judge", "plugins": [{"type": "ptp", "mtu": 1400, "ipam": {"type": "host-local",
	  "dataDir": "$d/ipam", "ranges": [[{"subnet": "10.244.$n.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
	  {"type": "portmap", "capabilities": {"portMappings": true}}]}
	C
	cat >"$d/kubelet.yaml" <<-Y
	apiVersion: kubelet.config.k8s.io/v1beta1
	kind: KubeletConfiguration
	failCgroupV1: false
	cgroupDriver: cgroupfs
	cgroupRoot: /kvatlas-kube/$name
	containerRuntimeEndpoint: unix://$d/containerd.sock
	authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
	authorization: {mode: Webhook}
	tlsCertFile: $pki/$name.crt
	tlsPrivateKeyFile: $pki/$name.key
	clusterDNS: ["10.96.0.10"]
	clusterDomain: cluster.local
	failSwapOn: false
	resolvConf: $dir/resolv.conf
	podLogsDir: $d/varlog
	evictionHard: {memory.available: 50Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
	imageGCHighThresholdPercent: 100
	localStorageCapacityIsolation: false
	volumePluginDir: $d/volume-plugins
	Y
	start "$name" nsenter --net=/run/netns/"$name" \
		unshare --mount --propagation private --pid --uts --fork --kill-child --mount-proc bash "$0" "$dir" node-init "$n"
}

# node_init N runs the programs of a node as process 1 of the node's namespaces.
node_init() {
	local n=$1 d=$dir/n$1 name=node$1 image
	hostname "$name"
	mkdir -p /var/lib/kubelet /var/log/containers /run/containerd
	mount --bind "$d/kubelet" /var/lib/kubelet
	mount --bind "$d/containers" /var/log/containers
	mount -t tmpfs none /run/containerd
	mount -t tmpfs none /run/netns # the network namespaces of pods
	mount --make-rshared /
	start "containerd$n" containerd --config "$d/containerd.toml"
	wait_for 60 "the socket of containerd" test -S "$d/containerd.sock"
	wait_for 60 "containerd" ctr -a "$d/containerd.sock" version
	for image in "$dir"/images/*.tar; do
		ctr -a "$d/containerd.sock" -n k8s.io images import "$image" >/dev/null
	done
	start "kubelet$n" kube kubelet --config "$d/kubelet.yaml" --kubeconfig "$pki/$name.conf" --hostname-override "$name" \
		--node-ip "$net.$((10 + n))" --root-dir /var/lib/kubelet -v 2
	start "kube-proxy$n" kube kube-proxy --kubeconfig "$pki/proxy.conf" --hostname-override "$name" \
		--proxy-mode nftables --cluster-cidr 10.244.0.0/16 --conntrack-max-per-core 0 \
		--conntrack-tcp-timeout-established 0s --conntrack-tcp-timeout-close-wait 0s
	# kube-router enforces NetworkPolicies. kube-router exits without a registered node, and panics with a health port of 0.
	wait_for 180 "$name in the API" kube kubectl --kubeconfig "$pki/policies.conf" get node "$name"
	start "kube-router$n" kube-router --kubeconfig "$pki/policies.conf" --hostname-override "$name" --run-router=false \
		--run-service-proxy=false --run-firewall=true --run-loadbalancer=false --service-cluster-ip-range 10.96.0.0/16 \
		--health-port 20244
	wait
}

# cgroups N makes the cgroups of a node. The children of a cpuset start without processors.
cgroups() {
	local c v1
	if [ ! -d /sys/fs/cgroup/memory ]; then
		echo "cluster.sh: /sys/fs/cgroup/memory does not exist: the script needs cgroups of version 1" >&2
		exit 1
	fi
	for v1 in systemd unified cpu cpuacct cpuset memory devices freezer blkio pids hugetlb; do
		[ ! -d /sys/fs/cgroup/$v1 ] || mkdir -p /sys/fs/cgroup/$v1/kvatlas-kube/node"$1"
	done
	# All pods together are a single group. Every other process of the machine has 1,024 shares.
	echo 16384 >/sys/fs/cgroup/cpu/kvatlas-kube/cpu.shares
	for c in kvatlas-kube kvatlas-kube/node"$1"; do
		cat /sys/fs/cgroup/cpuset/cpuset.cpus >/sys/fs/cgroup/cpuset/$c/cpuset.cpus
		cat /sys/fs/cgroup/cpuset/cpuset.mems >/sys/fs/cgroup/cpuset/$c/cpuset.mems
	done
}

network() { # network NODES creates a bridge, and a network namespace with an address and routes for every node
	local n c
	mkdir -p /run/netns
	mount -t tmpfs none /run/netns
	ip link set lo up
	ip link add br0 type bridge
	ip addr add $net.1/24 dev br0
	ip link set br0 up
	sysctl -qw net.ipv4.ip_forward=1
	for n in $(seq "$1"); do
		ip netns add node"$n"
		ip -n node"$n" link set lo up
		ip link add node"$n" type veth peer name eth0 netns node"$n"
		ip link set node"$n" master br0 up
		ip -n node"$n" addr add $net.$((10 + n))/24 dev eth0
		ip -n node"$n" link set eth0 up
		ip -n node"$n" route add default via $net.1
		nsenter --net=/run/netns/node"$n" sysctl -qw net.ipv4.ip_forward=1
		ip route add 10.244."$n".0/24 via $net.$((10 + n))
	done
	for n in $(seq "$1"); do # every node has routes to the pods of all other nodes
		for c in $(seq "$1"); do
			[ "$n" = "$c" ] || ip -n node"$n" route add 10.244."$c".0/24 via $net.$((10 + c))
		done
	done
}

# up NODES starts the cluster, waits for all nodes, creates FOLDER/ready, and runs until the end of the cluster.
up() {
	local n
	mkdir -p "$dir"/{pki,log,etcd}
	chmod 700 "$dir/etcd"
	: >"$dir/resolv.conf"
	# The folder of volumes. NATS reserves space for streams by the size of the disk, so the size is fixed.
	mkdir -p "$dir/disks"
	mount -t tmpfs -o size=100g none "$dir/disks"
	network "$1"
	for n in $(seq "$1"); do cgroups "$n"; done
	control_plane
	for n in $(seq "$1"); do node "$n"; done
	# The API server rejects pods before the account exists.
	wait_for 60 "the service account default" kubectl get serviceaccount default
	for n in $(seq "$1"); do
		wait_for 180 "node$n" kubectl get node "node$n"
		kubectl patch node "node$n" -p "{\"spec\":{\"podCIDR\":\"10.244.$n.0/24\",\"podCIDRs\":[\"10.244.$n.0/24\"]}}"
		kubectl wait --for=condition=Ready "node/node$n" --timeout=180s
	done
	touch "$dir/ready"
	wait
}

trap 'exit 1' TERM # process 1 has no default action for signals
case $2 in
node-init) node_init "$3" ;;
*) up "$2" >>"$dir/log/up" ;;
esac
