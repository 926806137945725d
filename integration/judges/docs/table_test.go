//go:build judges

package docs

// page describes a page for the judge. A page without an entry runs on a machine with only the programs.
type page struct {
	clone      bool     // the commands run in a clone
	given      []string // commands of the reader before the page
	replace    []string // parts of commands: on the page, as the reader writes them
	exceptions []exception
	covered    string // no block runs: the reason, with the test that runs the commands
}

// exception is a block that is not just executed.
type exception struct {
	begins  string // the first line of the block begins so
	covered string // the block does not run: the reason, with the test that runs the commands

	fresh   bool       // the reader first stops the programs of earlier blocks
	before  []string   // commands of the reader that the page describes in words
	shows   string     // a command in words; the block is its output
	status  string     // expected exit status of the commands, if not 0
	until   string     // a command that succeeds when the programs in the background of the block are ready
	compare comparison // of output. A block without commands is the output of the command before.
	settles bool       // the commands only read, and repeat until the output is the page's
}

// engine is one engine with all prompts in the index, as in docs/try.md. engineAs is the same with other flags.
var engine = engineAs("")

func engineAs(flags string) []string {
	return []string{
		"indexer serve " + flags,
		"worker-shim simulate --requests 100 --rate 100 --once --print-prompt prompt.json --serve 127.0.0.1:8000 " +
			"--model llama",
		"worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --worker worker-1 --model llama " +
			"--block-size 16 --serving-endpoint http://127.0.0.1:8000 --total-kv-blocks 20000",
	}
}

// vllm is one vLLM server, as in README.md.
var vllm = []string{"indexer serve", "vllm serve llama", "worker-shim run --engine-http http://127.0.0.1:8000"}

// twoMore are two more nodes.
var twoMore = []string{
	"indexer serve --nats nats://127.0.0.1:4222 --node-id indexer-2 --http-listen 127.0.0.1:8092",
	"indexer serve --nats nats://127.0.0.1:4222 --node-id indexer-3 --http-listen 127.0.0.1:8093",
}

// requests are booked requests for the last prompt of an engine, and for others.
const requests = `for i in $(seq 12); do
	curl -sf http://127.0.0.1:8090/v1/select -H 'Content-Type: application/json' \
		-d "{\"model\":\"llama\",\"book\":true,\"request_id\":\"r$i\",\"tokens\":$(
			head -c 60000 prompt.json | sed 's/,[0-9]*\n*$/]/')}"
done`

// servers are three NATS servers with one log.
const servers = `for i in 1 2 3; do
	nats-server -js -sd nats-$i -a 127.0.0.1$i -p 4222 --name n$i --cluster_name c --cluster nats://127.0.0.1$i:6222 \
		--routes nats://127.0.0.11:6222,nats://127.0.0.12:6222,nats://127.0.0.13:6222 2>nats-$i.log &
done`

// certificate writes a certificate of its own authority, for the host indexer.
func certificate(key, file string) string {
	return "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=indexer " +
		"-addext subjectAltName=DNS:indexer -keyout " + key + " -out " + file
}

// sameUsers are the flags of a section before, which a reader keeps.
const sameUsers = "indexer serve --nats-config accounts.conf --config keys/prod-node.yaml "

const (
	kubernetes = "needs Kubernetes: TestPage, TestChart, TestManifests, TestAutoscale"
	itself     = "runs this judge"
	published  = "needs the published module"
	measuring  = "builds other projects and measures for minutes"
)

// uncovered are the reasons without a test.
var uncovered = []string{itself, published, measuring}

// table has the pages with exceptions.
var table = map[string]page{
	"README.md": {clone: true, given: []string{"vllm serve llama"}, exceptions: []exception{
		{begins: "go test ./...", covered: itself},
		{begins: "make judges", covered: itself},
		{begins: "tar -xzf bin/release", covered: "needs a release: TestRelease"},
		{begins: "go install github.com", covered: published},
	}},
	"docs/api.md": {given: engine},
	"docs/capacity.md": {exceptions: []exception{
		{begins: "$ indexer capacity", covered: "needs several workers: TestCapacity"},
	}},
	"docs/client.md": {given: vllm, exceptions: []exception{
		{begins: "nats request", covered: "needs the program nats: TestEndpoints"},
	}},
	"docs/cluster.md": {given: append([]string{"indexer serve --node-id indexer-1"}, twoMore...), exceptions: []exception{
		{begins: "$ indexer cluster", compare: numbers, settles: true}, // any node answers, with its own view
		{begins: "indexer serve --nats nats://nats-1", fresh: true, before: []string{servers}},
	}},
	"docs/commands.md": {given: engineAs("--node-id indexer-1"), replace: []string{"WORKER", "worker-1", "MODEL", "other",
		"indexer top ", "indexer top --once ", "indexer what-if", "! indexer what-if", "indexer import",
		"! indexer import", "indexer workers clear", "! indexer workers clear", "indexer models", "! indexer models"}},
	"docs/compare.md": {exceptions: []exception{
		{begins: "make bench-path", covered: measuring},
		{begins: "make bench-peers", covered: measuring},
		{begins: "indexer bench select", covered: measuring},
	}},
	"docs/compatibility.md": {given: engine},
	"docs/doctor.md": {given: engine, exceptions: []exception{
		{begins: "$ indexer doctor", compare: numbers, settles: true, before: []string{
			"worker-shim simulate --endpoint tcp://127.0.0.1:5608 --replay tcp://127.0.0.1:5708 &",
			"KVATLAS_LEASE=3s worker-shim run --engine tcp://127.0.0.1:5608 --worker worker-8 --model llama " +
				"--block-size 16 & shim=$!",
			"until indexer workers | grep worker-8; do :; done",
			"kill -9 $shim; until indexer workers 2>&1 | grep worker-8/0.is.gone; do :; done",
		}},
	}},
	"docs/funnel.md": {given: engine, exceptions: []exception{
		{begins: "indexer funnel", before: []string{requests}},
	}},
	"docs/gateways.md": {clone: true, given: []string{"vllm serve llama", certificate("indexer.key", "indexer.crt"),
		"cp indexer.crt gateways-ca.crt"}, exceptions: []exception{
		// The chat was tokenized.
		{begins: "curl -i", until: `curl -s http://127.0.0.1:8090/metrics | grep '^kvatlas_tokenize_total.*outcome="ok"'`},
	}},
	"docs/hot-prefixes.md": {given: engine, exceptions: []exception{
		{begins: "$ indexer prefixes hot", covered: "needs a hot prefix: TestHotPrefixes"},
		{begins: "indexer prefixes warm", covered: "needs a hot prefix: TestHotPrefixes"},
	}},
	"docs/install.md": {clone: true, exceptions: []exception{
		{begins: "make release", covered: "writes to /usr/local: TestRelease"},
		{begins: "go install github.com", covered: published},
		{begins: "helm install", covered: kubernetes},
		{begins: "pip install './clients", covered: "needs a package registry: TestPythonPackage"},
		{begins: "pip install 'kvatlas[", covered: published},
		{begins: "worker-shim pods", covered: "needs Kubernetes: TestPage"},
		{begins: "indexer namespace delete", before: []string{
			"indexer auth create --shim worker-1 --keys keys > accounts.conf",
			"nats-server -js -sd nats -a 127.0.0.11 -c accounts.conf 2>nats.log &",
			"indexer serve --nats nats://nats-1:4222 --config keys/default-node.yaml 2>serve.log & " +
				"until grep -q msg=ready serve.log; do :; done; kill $!; wait $!",
		}},
	}},
	"docs/l3.md": {given: engine, exceptions: []exception{
		{begins: "worker-shim run --source mooncake", covered: "needs a store's master with events: TestStoreEvents"},
	}},
	"docs/observe.md": {exceptions: []exception{{begins: "promtool", covered: "needs Prometheus: TestRules"}}},
	"docs/page.md": {exceptions: []exception{
		{begins: "indexer serve", covered: "needs a browser: TestFleet"},
		{begins: "curl -N", before: engine},
	}},
	"docs/recording.md": {given: engineAs("--record --node-id n1"), exceptions: []exception{
		{begins: "NODE  RECORDING", before: []string{requests}, shows: "indexer record status", compare: numbers,
			settles: true},
	}},
	"docs/regions.md": {exceptions: []exception{
		{begins: "$ indexer query", covered: "needs three regions: TestRegions"},
	}},
	"docs/routing.md": {given: engine, exceptions: []exception{
		{begins: "$ indexer select", covered: "needs loads by design: TestOutputInDocs"},
	}},
	"docs/routing-reference.md": {given: engine},
	"docs/scaling.md": {given: engineAs("--record"), exceptions: []exception{
		{begins: "$ curl", compare: numbers, settles: true},
		{begins: "kubectl -n inference create secret generic kvatlas-keda", covered: "needs KEDA: TestScaling"},
		{begins: "kubectl -n kube-system", covered: kubernetes},
		{begins: "$ indexer workers rank-for-removal", before: []string{requests}, compare: numbers,
			settles: true},
	}},
	"docs/security.md": {given: []string{certificate("key.pem", "cert.pem"), "cp cert.pem ca.pem"},
		replace: []string{"indexer serve --http-listen", sameUsers + "--http-listen", "indexer serve --dial-allow",
			sameUsers + "--dial-allow"}, exceptions: []exception{
			{begins: "worker-shim run --nats tls://nats-1", covered: "needs NATS with TLS: TestUsersComeAndGo"},
			{begins: "indexer auth add", covered: "needs NATS with TLS: TestUsersComeAndGo"},
		}},
	"docs/sessions.md": {exceptions: []exception{
		{begins: "$ indexer sessions chat-17", covered: "needs events with session ids: TestSessionBlocks"},
		{begins: "$ indexer sessions end", compare: numbers, before: append([]string{
			"printf 'session_affinity: {ttl_secs: 600, mode: soft}\n' > routing.yaml"},
			append(engineAs("--routing-config routing.yaml"),
				`curl -sf http://127.0.0.1:8090/v1/select -H 'Content-Type: application/json' `+
					`-d '{"model":"llama","tokens":[1,2,3],"request_id":"r1","book":true,"session_id":"chat-17"}'`)...)},
	}},
	"docs/sglang-router.md": {given: []string{"indexer serve",
		"worker-shim simulate --requests 100 --rate 100 --once --block-size 64"}},
	"docs/simulate.md": {given: []string{`for i in $(seq 200); do
		echo "{\"timestamp\":$((i*100)),\"input_length\":1024,\"output_length\":16,\"hash_ids\":[$((i%9)),$((i%9+10))]}"
	done > requests.jsonl`}},
	"docs/tenants.md": {given: engine, exceptions: []exception{
		{begins: "indexer serve --tenants", covered: "needs tenants' requests: TestTenants"},
	}},
	"docs/text.md": {given: []string{
		`echo 'models: {llama: {tokenize: "http://127.0.0.1:8000"}}' > tokenizers.yaml`,
		`echo '[{"role":"user","content":"hello"}]' > chat.json`, "vllm serve llama",
		"indexer serve --tokenizers tokenizers.yaml", "worker-shim run --engine-http http://127.0.0.1:8000"},
		exceptions: []exception{
			{begins: "kubectl -n inference create secret generic engine-token", covered: "needs Kubernetes: TestValues"},
		}},
	"docs/top.md": {given: engine, exceptions: []exception{
		{begins: "$ indexer top", covered: "needs a terminal: TestTop"},
	}},
	"docs/tracing.md": {given: []string{"indexer serve", "vllm serve llama"}, replace: []string{"indexer serve ...",
		"indexer serve", "worker-shim run ...", "worker-shim run --engine-http http://127.0.0.1:8000"}},
	"docs/try.md": {clone: true, exceptions: []exception{
		{begins: "kvatlas demo", compare: numbers},
		{begins: "indexer serve\nworker-shim simulate",
			until: "indexer query --model llama --tokens-file prompt.json | grep 100%"},
		{begins: "indexer serve --node-id", fresh: true,
			until: `[ $(cat ../script-*.err | grep -c "stays idle") = 8 ] && [ $(indexer workers | grep -c ^worker) = 8 ] && ` +
				`indexer query --model llama --tokens-file prompt-3.json | grep 100%`},
		{begins: "echo 'models:", before: []string{"kill $(jobs -p); wait"}, // until both engines and the tokens are there
			until: `[ $(curl -s http://127.0.0.1:8090/v1/workers | grep -o '"http://127.0.0.1:800.' | sort -u | wc -l) = 2 ] && ` +
				`curl -s http://127.0.0.1:8090/v1/select -H 'Content-Type: application/json' ` +
				`-d '{"model":"llama","prompt":"a b"}' | grep '"endpoint":.*"tokenized":true'`},
	}},
	"docs/upgrade.md": {given: engine, exceptions: []exception{
		{begins: "indexer auth create", before: []string{
			"indexer auth create --namespace prod --shim worker-1 --keys keys > earlier.conf",
			"rm keys/roster.json"}}, // as version 0.4
	}},
	"docs/what-if.md": {exceptions: []exception{
		{begins: "indexer what-if", covered: "needs a day of traffic: TestWhatIf"},
	}},
	"docs/worker-records.md": {given: engine, replace: []string{"WORKER", "worker-1"}},
	"docs/engines/sglang.md": {given: []string{"indexer serve", "vllm serve llama --port 30000"}, exceptions: []exception{
		{begins: "python -m sglang", covered: "needs SGLang: TestSGLangAsJudge"},
	}},
	"docs/engines/tensorrt-llm.md": {given: []string{"indexer serve",
		"worker-shim simulate --requests 100 --rate 100 --once --block-size 32",
		`my-adapter() { echo '{"worker_id":"w1","event":{"event_id":1,"dp_rank":0,"data":"cleared"}}'; sleep 600; }`,
		"mkdir -p /run/kvatlas"}},
	"docs/engines/vllm.md": {replace: []string{"vllm serve ...", "vllm serve llama", "worker-shim run ...",
		"worker-shim run --engine tcp://127.0.0.1:5557 --worker worker-1 --model llama --block-size 16"},
		exceptions: []exception{
			{begins: "worker-shim run --listen", fresh: true, before: []string{"indexer serve"}},
			{begins: "vllm serve ... --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\n" +
				`    "endpoint":"tcp://SHIM_HOST`, covered: "needs an engine that connects: TestFiftyEnginesAtOneShim"},
			{begins: "worker-shim run ... --kv-groups", fresh: true, before: []string{"indexer serve", "vllm serve llama"}},
		}},
	"docs/reference.md":                   {covered: "synopses: TestReferencePages"},
	"docs/kubernetes.md":                  {covered: kubernetes},
	"docs/gateways-kubernetes.md":         {covered: kubernetes},
	"docs/upgrade-kubernetes.md":          {covered: kubernetes},
	"deploy/helm/kvatlas/README.md":       {covered: kubernetes},
	"deploy/kubernetes/README.md":         {covered: kubernetes},
	"deploy/kubernetes/gateway/README.md": {covered: kubernetes},
	"deploy/systemd/README.md":            {covered: "needs systemd as process 1: TestUnitsVerify"},
	"clients/python/README.md":            {covered: "needs a package registry: TestPythonPackage"},
	"docs/engines/dynamo.md":              {covered: "needs etcd and Dynamo: TestEventPlane, TestDynamoPlane"},
}
