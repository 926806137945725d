package launch

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/server"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Process configures the process of a node. The flags of indexer serve set the exported fields.
type Process struct {
	server.Settings

	NATS                     *cli.NATS // without a URL, a NATS server runs in this process
	NATSListen, NATSConfig   string    // of the NATS server in this process
	NATSWait                 time.Duration
	SyncInterval             time.Duration
	StoreBytes               int64
	PendingFor, TombstoneFor time.Duration
	ForwardQueries           bool
	OnRefused                string

	// The files of further settings; "" is none.
	L3Config, RoutingConfig, TokenizersFile, GRPCClientCA, ExternalMetricsClientCA, QuotasFile string

	L3Master func() (hicache.Master, error)
	Rule     func() (*dial.Rule, error)
	Security *cli.HTTPSecurity
	Debug    *cli.Debug
	Traces   *cli.Traces

	passed map[string]hicache.Passed // unknown fields of L3Config, by model
}

// Check checks the settings, reads their files, and fills in the settings of the node that several flags make up. wrong
// has the errors of single flags.
func (p *Process) Check(wrong cli.Complaints) error {
	wrong.When(p.LogAge > 0 && p.LogAge < 2*p.SnapshotInterval,
		"--log-age %v is less than twice --snapshot-interval %v: messages would leave the log before the second snapshot",
		p.LogAge, p.SnapshotInterval)
	p.checkPorts(&wrong)
	p.checkEngines(&wrong)
	wrong = append(wrong, p.Guesses.Check())
	p.NoForwarding = !p.ForwardQueries
	p.readFiles(&wrong)
	if err := wrong.Usage(); err != nil {
		return err
	}
	p.Index.PendingFor = events.Millis(p.PendingFor.Milliseconds())
	p.Index.TombstoneFor = events.Millis(p.TombstoneFor.Milliseconds())
	if p.ID == "" {
		if p.ID, _ = os.Hostname(); p.ID == "" {
			p.ID = "indexer"
		}
	}
	return nil
}

// checkPorts checks the settings of the ports. A client certificate replaces the token of gRPC.
func (p *Process) checkPorts(wrong *cli.Complaints) {
	listen := map[string]string{"--http-listen": p.HTTPListen, "--select-listen": p.SelectListen,
		"--slot-tracker-listen": p.SlotTrackerListen, "--conductor-listen": p.ConductorListen, "--grpc-listen": p.GRPCListen}
	wrong.When(p.GRPCInsecure && p.GRPCListen == "", "--grpc-insecure has no effect without --grpc-listen")
	wrong.When(p.GatewayPrefill == server.PrefillByVLLM && p.GRPCListen == "",
		"--gateway-prefill %s has no effect without --grpc-listen", server.PrefillByVLLM)
	wrong.When(p.ForwardTokens && (p.GRPCListen == "" || p.TokenizersFile == ""),
		"--forward-tokens needs --grpc-listen and --tokenizers: it changes the texts of gateways' requests")
	if p.GRPCClientCA != "" {
		wrong.When(p.GRPCListen == "", "--grpc-client-ca has no effect without --grpc-listen")
		delete(listen, "--grpc-listen")
	}
	*wrong = append(*wrong, p.Debug.Check(), p.Security.Check(listen), p.Traces.Check())
	if p.GRPCClientCA != "" {
		var err error
		p.GRPCClientCAs, err = readAuthorities(p.GRPCClientCA)
		wrong.About("--grpc-client-ca", err)
		wrong.When(p.Security.TLS == nil, "--grpc-client-ca needs --http-cert and --http-key: certificates are part of TLS")
	}
	p.checkExternalMetrics(wrong)
}

// checkExternalMetrics checks the settings of the port for Kubernetes' API server. Client certificates replace tokens.
func (p *Process) checkExternalMetrics(wrong *cli.Complaints) {
	m := &p.ExternalMetrics
	if m.Listen == "" {
		return
	}
	wrong.When(p.Security.TLS == nil, "--external-metrics-listen needs --http-cert and --http-key: an API server connects "+
		"over TLS")
	wrong.When(len(m.Clients) == 0, "--external-metrics-client is empty, so no API server would be admitted")
	wrong.When(p.ExternalMetricsClientCA == "", "--external-metrics-listen needs --external-metrics-client-ca: the "+
		"certificate of the API server replaces a token")
	if p.ExternalMetricsClientCA == "" {
		return
	}
	var err error
	m.Authorities, err = readAuthorities(p.ExternalMetricsClientCA)
	wrong.About("--external-metrics-client-ca", err)
}

// checkEngines checks the settings of the shims in this process.
func (p *Process) checkEngines(wrong *cli.Complaints) {
	var err error
	p.Engines.OnRefused, err = shim.ParseOnRefused(p.OnRefused)
	wrong.About("--on-engine-refused", err)
	wrong.When(p.Engines.GoneAfter != 0 && p.Engines.GoneAfter < p.Engines.SilentAfter,
		"--engine-gone-after %v is less than --engine-silent-after %v", p.Engines.GoneAfter, p.Engines.SilentAfter)
}

// readFiles reads the files of further settings, the networks of addresses, and the master of the shared store.
func (p *Process) readFiles(wrong *cli.Complaints) {
	var err error
	p.Routing, err = ReadRouting(p.RoutingConfig)
	wrong.About("--routing-config", err)
	p.Screen.Rule, err = p.Rule()
	wrong.About("--dial-allow", err)
	for i, folder := range p.Screen.Folders {
		wrong.When(!filepath.IsAbs(folder), "--l3-folder %q is not an absolute path", folder)
		p.Screen.Folders[i] = filepath.Clean(folder)
	}
	p.Tokenizers, err = tokenize.ReadSettings(p.TokenizersFile)
	wrong.About("--tokenizers", err)
	p.readQuotas(wrong)
	p.L3.Master, err = p.L3Master()
	*wrong = append(*wrong, err)
	if p.L3Config != "" {
		p.L3.Models, p.passed, err = readL3Config(p.L3Config)
		wrong.About("--l3-config", err)
		for model, c := range p.L3.Models {
			p.L3.Models[model] = c.WithMaster(p.L3.Master)
		}
	}
}

// readQuotas reads the quotas of tenants. A lowered request needs a queue, and a class of it.
func (p *Process) readQuotas(wrong *cli.Complaints) {
	var err error
	p.Attribution.Quotas, err = tenants.ReadQuotas(p.QuotasFile)
	wrong.About("--tenant-quotas", err)
	for name, q := range p.Attribution.Quotas {
		wrong.When(q.Over == tenants.Lower && p.Routing.Queue == nil,
			"--tenant-quotas: %q lowers priorities, which needs a queue in the file of --routing-config", name)
		named := func(c routing.QueueClass) bool { return q.Class == c.Name || q.Class == c.Family }
		wrong.When(q.Class != "" && p.Routing.Queue != nil && !slices.ContainsFunc(p.Routing.Queue.Classes, named),
			"--tenant-quotas: %q names the class %q, which the queue does not have", name, q.Class)
	}
}

// Run serves until ctx ends.
func (p *Process) Run(ctx context.Context, log *slog.Logger) error {
	p.warnPassed(log)
	debugStop, err := p.Debug.Serve(log)
	if err != nil {
		return err
	}
	defer debugStop()
	tracer, tracesEnd, err := p.Traces.Open(ctx, "kvatlas-indexer", p.ID, log)
	if err != nil {
		return err
	}
	defer tracesEnd()
	p.Tracer = tracer
	cli.SaveMemory(cli.IndexerRoom)
	began := time.Now()
	if p.Conn, p.Embedded, err = p.connect(ctx, log); err != nil {
		return err
	}
	if p.Embedded != nil {
		p.Began = began
		defer p.Embedded.Stop()
		if p.NATSConfig != "" {
			defer reloadOnHangup(p.Embedded, log)()
		}
	}
	defer p.Conn.Close()
	p.Version, p.HTTPTokens, p.HTTPTLS = cli.Version(), p.Security.Tokens, p.Security.TLS
	p.ClearText = p.Security.ClearText()
	p.HTTPTokens.LogStart(log, p.ClearText)
	p.Ready = func() {
		if err := cli.NotifyReady(); err != nil {
			log.Warn("cannot report the readiness of this node to the service manager", "error", err, "what_to_do",
				"check that the unit has Type=notify, and that only the service manager sets NOTIFY_SOCKET")
		}
	}
	node, err := server.New(ctx, p.Settings, log)
	if err != nil {
		return err
	}
	return node.Run(ctx)
}

// warnPassed logs the unknown fields of --l3-config.
func (p *Process) warnPassed(log *slog.Logger) {
	for _, model := range slices.Sorted(maps.Keys(p.passed)) {
		log.Warn("unknown fields of --l3-config are ignored", "model", model, "fields", p.passed[model],
			"what_to_do", p.passed[model].Remedy())
	}
}
