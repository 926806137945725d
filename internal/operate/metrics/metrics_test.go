package metrics

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// configOf returns a configuration that exports a status.
func configOf(s api.Status) Config {
	return Config{Figures: func() *Figures { return &Figures{Status: &s} }}
}

func scrape(t *testing.T, cfg Config) string {
	t.Helper()
	handler, _ := New(cfg)
	return get(t, handler)
}

func get(t *testing.T, handler http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// TestSharedStores: two kinds of names at one place are one store, because a label set must be unique.
func TestSharedStores(t *testing.T) {
	text := scrape(t, configOf(api.Status{L3: []api.StoreStatus{
		{Store: "/pages", Questions: 1},
		{Store: "etcd://e:1 c", Election: &api.StoreElection{Leader: "m:1", Changes: 2, Failures: 3}},
		{Store: "etcd://e:1 c", Election: &api.StoreElection{Leader: "m:1", Changes: 1, Failures: 4}},
		{Store: "m:9003", Remembered: 7, Questions: 10, Failed: 3, Busy: 1, Forgotten: 2, Partial: 4,
			Set: &api.StoreSet{Objects: 5, Whole: true, Answered: 4}},
		{Store: "m:9003", Questions: 5, Down: "away", Strange: 6, Partial: 5,
			Set: &api.StoreSet{Gaps: 2, Overflows: 1, Asked: 8}},
	}}))
	for _, want := range []string{
		`kvatlas_l3_up{store="/pages"} 1`,
		`kvatlas_l3_leaders_total{store="etcd://e:1 c"} 3`,
		`kvatlas_l3_election_failures_total{store="etcd://e:1 c"} 7`,
		`kvatlas_l3_up{store="m:9003"} 0`,
		`kvatlas_l3_questions_total{outcome="ok",store="m:9003"} 12`,
		`kvatlas_l3_questions_total{outcome="failed",store="m:9003"} 3`,
		`kvatlas_l3_questions_total{outcome="busy",store="m:9003"} 1`,
		`kvatlas_l3_partial_answers_total{store="m:9003"} 9`,
		`kvatlas_l3_forgotten_total{store="m:9003"} 2`,
		`kvatlas_l3_remembered_runs{store="m:9003"} 7`,
		`kvatlas_l3_strange_objects_total{store="m:9003"} 6`,
		`kvatlas_l3_set_objects{store="m:9003"} 5`,
		`kvatlas_l3_set_whole{store="m:9003"} 0`,
		`kvatlas_l3_set_given_up_total{reason="gap",store="m:9003"} 2`,
		`kvatlas_l3_set_given_up_total{reason="size",store="m:9003"} 1`,
		`kvatlas_l3_objects_total{from="set",store="m:9003"} 4`,
		`kvatlas_l3_objects_total{from="store",store="m:9003"} 8`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("missing: %s", want)
		}
	}
	if strings.Contains(text, `kvatlas_l3_set_whole{store="/pages"}`) {
		t.Error("a folder has metrics of events")
	}
}

// TestRequests: requests are counted by all their labels.
func TestRequests(t *testing.T) {
	text := scrape(t, configOf(api.Status{Requests: []api.RequestCount{
		{Transport: api.OverNATS, Operation: ops.Find, Outcome: ops.OK, Count: 7}, {Transport: api.OverNATS,
			Operation: ops.Find, Outcome: "busy", Count: 3},
	}}))
	for _, want := range []string{
		`kvatlas_requests_total{operation="find",outcome="ok",transport="nats"} 7`,
		`kvatlas_requests_total{operation="find",outcome="busy",transport="nats"} 3`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("missing: %s", want)
		}
	}
}

// TestNames: exactly the counters end in _total, and every metric of this project has a help text.
func TestNames(t *testing.T) {
	text := scrape(t, configOf(api.Status{Events: map[string]uint64{"messages": 1},
		Partitions: make([]api.PartitionDetail, 1), Models: make([]api.ModelStatus, 1), L3: make([]api.StoreStatus,
			1), Requests: make([]api.RequestCount, 1)}))
	types := regexp.MustCompile(`(?m)^# TYPE (kvatlas_\S+) (\S+)$`).FindAllStringSubmatch(text, -1)
	if len(types) < 20 {
		t.Fatalf("only %d metrics", len(types))
	}
	for _, m := range types {
		if (m[2] == "counter") != strings.HasSuffix(m[1], "_total") {
			t.Errorf("%s is a %s", m[1], m[2])
		}
		if !strings.Contains(text, "# HELP "+m[1]+" ") {
			t.Errorf("%s has no help", m[1])
		}
	}
}

// TestHedgesDenied: a renamed metric is served under both names.
func TestHedgesDenied(t *testing.T) {
	handler, q := New(configOf(api.Status{}))
	q.HedgesDenied(3)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	for _, want := range []string{"kvatlas_peer_hedges_denied_total 3", "kvatlas_peer_hedges_withheld_total 3"} {
		if !strings.Contains(w.Body.String(), "\n"+want+"\n") {
			t.Errorf("missing: %s", want)
		}
	}
}

// TestSelections: choices are counted by policy and outcome, and bookings by outcome.
func TestSelections(t *testing.T) {
	handler, queries := New(configOf(api.Status{Load: &api.LoadStatus{Healed: 7, Models: []api.ModelDigest{
		{Model: "m", Requests: 3, Conflicts: 4, Expired: 5, Rivals: 6, Booked: 30, Freed: 31, Full: 32, Gone: 33},
		{Model: "m", Group: "g", Requests: 2}}},
		Waiting:        []api.WaitingStatus{{Model: "m", Requests: 8, Tokens: 9}},
		Sessions:       &api.SessionStatus{Sessions: 10, Made: 11, Kept: 12, Moved: 13, Refused: 14, Full: 15, Expired: 16},
		EngineReports:  &api.ReportCounts{Taken: 17, Late: 18, Refused: 19, Malformed: 20},
		RouterRequests: &api.RouterRequestCounts{Requests: 41, Added: 42, Own: 43},
		Recording:      &api.RecordingStatus{Stored: 44, Dropped: 45, WaitingBytes: 46},
		Regions: &api.RegionsStatus{Region: "eu", Published: 71, PublishedBytes: 72, Failed: 73, DigestBlocks: 74,
			HeldBlocks: 75, MadeInMS: 76_000, Received: 77, Malformed: 78, Broken: 79, Refused: 80, Leaks: 81,
			Regions: []api.RegionStatus{{Region: "us", State: api.RegionPartial, AgeMS: 82_000, Bytes: 83},
				{Region: "ap", State: api.RegionUnknown}}},
		HotPrefixes: &api.HotStatus{Copies: 51, Failed: 52, Computed: 53, Requests: 54, Reused: 55, SavedMS: 56_000,
			PromptBytes: 57}}))
	queries.Selected("dynamo", ops.OK)
	queries.Selected("dynamo", ops.OK)
	queries.Selected("random", string(api.CodeOverloaded))
	queries.SelectionStage("match", 3*time.Microsecond)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	text := w.Body.String()
	for _, want := range []string{
		`kvatlas_selections_total{outcome="ok",policy="dynamo"} 2`,
		`kvatlas_selections_total{outcome="overloaded",policy="random"} 1`,
		`kvatlas_selection_stage_seconds_bucket{stage="match",le="4e-06"} 1`,
		`kvatlas_requests_under_way{model="m"} 3`, `kvatlas_requests_under_way{model="m:g"} 2`,
		`kvatlas_bookings_total{model="m",outcome="ok"} 30`, `kvatlas_bookings_total{model="m",outcome="conflict"} 4`,
		`kvatlas_bookings_total{model="m",outcome="full"} 32`, `kvatlas_bookings_ended_total{model="m",why="freed"} 31`,
		`kvatlas_bookings_ended_total{model="m",why="expired"} 5`, `kvatlas_bookings_ended_total{model="m",why="rival"} 6`,
		`kvatlas_bookings_ended_total{model="m",why="gone"} 33`,
		`kvatlas_bookings_healed_total 7`,
		`kvatlas_queue_requests{model="m"} 8`, `kvatlas_queue_tokens{model="m"} 9`, `kvatlas_sessions 10`,
		`kvatlas_session_bindings_total{outcome="made"} 11`, `kvatlas_session_bindings_total{outcome="kept"} 12`,
		`kvatlas_session_bindings_total{outcome="moved"} 13`, `kvatlas_session_bindings_total{outcome="refused"} 14`,
		`kvatlas_session_bindings_total{outcome="full"} 15`, `kvatlas_session_bindings_total{outcome="expired"} 16`,
		`kvatlas_router_requests 41`, `kvatlas_router_request_changes_total{outcome="added"} 42`,
		`kvatlas_router_request_changes_total{outcome="own"} 43`,
		`kvatlas_recording_records_total{outcome="stored"} 44`, `kvatlas_recording_records_total{outcome="dropped"} 45`,
		`kvatlas_recording_waiting_bytes 46`,
		`kvatlas_prefix_copies_total{outcome="made"} 51`, `kvatlas_prefix_copies_total{outcome="failed"} 52`,
		`kvatlas_prefix_copy_tokens_total 53`, `kvatlas_prefix_copy_requests_total 54`,
		`kvatlas_prefix_copy_reused_tokens_total 55`, `kvatlas_prefix_copy_saved_seconds_total 56`,
		`kvatlas_hot_prompt_bytes 57`,
		`kvatlas_region_digests_published_total{outcome="sent"} 71`, `kvatlas_region_published_bytes_total 72`,
		`kvatlas_region_digests_published_total{outcome="failed"} 73`, `kvatlas_region_digest_blocks 74`,
		`kvatlas_region_held_blocks 75`, `kvatlas_region_digest_seconds 76`, `kvatlas_region_leaks_total 81`,
		`kvatlas_region_digests_received_total{outcome="taken"} 77`,
		`kvatlas_region_digests_received_total{outcome="malformed"} 78`,
		`kvatlas_region_digests_received_total{outcome="broken"} 79`,
		`kvatlas_region_digests_received_total{outcome="refused"} 80`, `kvatlas_region_age_seconds{region="us"} 82`,
		`kvatlas_region_bytes{region="us"} 83`, `kvatlas_region_known{region="us"} 1`, `kvatlas_region_known{region="ap"} 0`,
		`kvatlas_engine_reports_total{outcome="taken"} 17`, `kvatlas_engine_reports_total{outcome="late"} 18`,
		`kvatlas_engine_reports_total{outcome="refused"} 19`, `kvatlas_engine_reports_total{outcome="malformed"} 20`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

// full returns a node's figures with every field set.
func full() *Figures {
	return &Figures{
		Status: &api.Status{
			Events: map[string]uint64{"messages": 1}, Partitions: make([]api.PartitionDetail, 1),
			Models: make([]api.ModelStatus, 1), L3: []api.StoreStatus{{Set: &api.StoreSet{}, Election: &api.StoreElection{}}},
			Requests: make([]api.RequestCount, 1), Cluster: &api.ClusterStatus{}, Engines: &api.EngineCounts{},
			Snapshots: api.SnapshotCounts{Rejected: map[string]uint64{"corrupt": 1}},
			Load:      &api.LoadStatus{Models: make([]api.ModelDigest, 1)},
			Guesses:   []api.GuessStatus{{Dropped: map[string]uint64{"lru": 1}}}, Waiting: make([]api.WaitingStatus, 1),
			Sessions: &api.SessionStatus{}, EngineReports: &api.ReportCounts{Failures: map[string]uint64{"status": 0}},
			RouterRequests: &api.RouterRequestCounts{}, Recording: &api.RecordingStatus{},
			HotPrefixes: &api.HotStatus{}, Regions: &api.RegionsStatus{Regions: []api.RegionStatus{{Region: "eu"}}},
			SnapshotBucket: api.Usage{Limit: 1},
			Store:          api.Usage{Limit: 1},
		},
		Events: make([]EventCount, 1), Loads: []WorkerLoad{{Worker: "w"}}, Spans: map[string]uint64{"sent": 1},
		Curves: map[string][]api.CapacityTier{"m": make([]api.CapacityTier, 1)},
	}
}

// everything is a scrape with each metric.
func everything(t *testing.T) string {
	f := full()
	f.Status.Partitions[0].Log.Limit, f.Status.Partitions[0].SnapshotTime = 1, time.Unix(1, 0)
	handler, q := New(Config{Figures: func() *Figures { return f }, Workers: 1, Tenants: 1})
	q.Observe("find", "ok", 1)
	q.Asked("first")
	q.Replied("ok", 1)
	q.HedgesDenied(1)
	q.Forwarded("answered")
	q.Missing("find", 1)
	q.Selected("dynamo", "ok")
	q.Reused("m", 1)
	q.Moved("m")
	q.Disaggregated("m", "prefill")
	q.Prefilled("m", "transfer", 1)
	q.TokenizationAvoided("m", 1, 1)
	q.PromptCompared("m", 1, 1, 1)
	q.Unsupported("chat", []string{"task"})
	q.Routed("m", 1, 1, [4]uint64{1}, [4]uint64{1}, "best")
	q.Attributed("salt:a", &tenants.Use{Requests: 1, Requested: 1})
	q.Best("m", 1)
	q.Tokenized("m", "local", "ok", 1)
	q.TextChecked("m", "same")
	return get(t, handler)
}

// TestCurves: each tier of a model's capacity curve has its shares.
func TestCurves(t *testing.T) {
	text := scrape(t, Config{Figures: func() *Figures {
		return &Figures{Status: &api.Status{}, Curves: map[string][]api.CapacityTier{
			"a": {{Tier: "device", Share: 0.5, Doubled: 0.25, Last: 0.125}, {Tier: "host", Share: 0.75}},
			"c": {{Tier: "device", Share: 0.3125, LastBound: true}},
			"b": {{Tier: "device", Share: 0.625}},
		}}
	}})
	for _, want := range []string{
		`kvatlas_capacity_hit_ratio{model="a",tier="device"} 0.5`, `kvatlas_capacity_hit_ratio{model="a",tier="host"} 0.75`,
		`kvatlas_capacity_hit_ratio{model="b",tier="device"} 0.625`,
		`kvatlas_capacity_doubled_gain_ratio{model="a",tier="device"} 0.25`,
		`kvatlas_capacity_last_loss_ratio{model="a",tier="device"} 0.125`,
		`kvatlas_capacity_hit_ratio{model="c",tier="device"} 0.3125`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("missing: %s", want)
		}
	}
	for _, name := range []string{"doubled_gain_ratio", "last_loss_ratio"} {
		if strings.Contains(text, `kvatlas_capacity_`+name+`{model="c"`) {
			t.Errorf("an unknown %s has a value", name)
		}
	}
}

// TestLint: Prometheus' own linter has no objections.
func TestLint(t *testing.T) {
	for _, text := range []string{everything(t), get(t, NewShim(shimFigures))} {
		problems, err := promlint.New(strings.NewReader(text)).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// TestWorkers: workers above the bound share a series. Without a request, no worker has a series.
func TestWorkers(t *testing.T) {
	f := &Figures{Status: &api.Status{}, Loads: []WorkerLoad{{Model: "m"},
		{"m", "w2", 1, 10, 100}, {"m", "w1", 2, 20, 200}, {"m", "w1", 3, 30, 300}, {"n", "w3", 4, 40, 400},
		{"m", "w4", 5, 50, 500}}}
	for _, c := range []struct {
		workers int
		want    []string
	}{
		{0, nil},
		{2, []string{`{model="m",worker="other"} 5`, `{model="m",worker="w1"} 5`, `{model="m",worker="w2"} 1`,
			`{model="n",worker="other"} 4`}},
		{9, []string{`{model="m",worker="w1"} 5`, `{model="m",worker="w2"} 1`, `{model="m",worker="w4"} 5`,
			`{model="n",worker="w3"} 4`}},
	} {
		handler, _ := New(Config{Figures: func() *Figures { return f }, Workers: c.workers})
		text := get(t, handler)
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^kvatlas_worker_load_requests(.*)$`).FindAllStringSubmatch(text, -1) {
			got = append(got, m[1])
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%d workers: %q, want %q", c.workers, got, c.want)
		}
		for _, want := range []string{`requests{model="m"} 11`, `requests_max{model="m"} 5`,
			`prefill_tokens{model="m"} 110`, `decode_blocks_max{model="m"} 500`, `requests{model="n"} 4`} {
			if !strings.Contains(text, "\nkvatlas_load_"+want+"\n") {
				t.Errorf("no %s", want)
			}
		}
	}
}

// TestModelsAreBounded: requests may name any model, and the series of models are bounded.
func TestModelsAreBounded(t *testing.T) {
	handler, q := New(configOf(api.Status{}))
	for i := range maxModels + 3 {
		q.Reused(fmt.Sprint("m", i), 1)
		q.Reused("m0", 1)
	}
	text := get(t, handler)
	for _, want := range []string{`{model="other"} 3`, fmt.Sprintf(`{model="m0"} %d`, maxModels+4)} {
		if !strings.Contains(text, "kvatlas_route_reused_tokens_total"+want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if n := strings.Count(text, "\nkvatlas_route_reused_tokens_total{"); n != maxModels+1 {
		t.Errorf("%d models", n)
	}
}

// TestPromptEstimates: an estimate is close within a tenth of the actual number.
func TestPromptEstimates(t *testing.T) {
	handler, q := New(configOf(api.Status{}))
	for _, estimated := range []uint64{90, 100, 110, 89, 111, 0} {
		q.PromptCompared("m", estimated, 100, 2)
	}
	text := get(t, handler)
	for _, want := range []string{
		`prompt_tokens_estimated_total{model="m"} 500`, `prompt_tokens_actual_total{model="m"} 600`,
		`completion_tokens_actual_total{model="m"} 12`, `prompt_estimates_total{model="m",outcome="close"} 3`,
		`prompt_estimates_total{model="m",outcome="off"} 3`} {
		if !strings.Contains(text, "\nkvatlas_"+want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

// TestUnsupportedFields: the names that clients invent have a bounded number of series, and do not hide known names.
func TestUnsupportedFields(t *testing.T) {
	handler, q := New(Config{Figures: func() *Figures { return full() }})
	for i := range 1000 {
		q.Unsupported("chat", []string{fmt.Sprint("made-up-", i)})
	}
	q.Unsupported("chat", []string{"reasoning", "made-up-3"})
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, httptest.NewRequest("GET", "/metrics", nil))
	text := recorder.Body.String()
	if n := strings.Count(text, "\nkvatlas_unsupported_fields_total{"); n != maxUnknown+2 {
		t.Errorf("%d series, want %d", n, maxUnknown+2)
	}
	for _, line := range []string{
		`kvatlas_unsupported_fields_total{api="chat",field="reasoning"} 1`,
		`kvatlas_unsupported_fields_total{api="chat",field="made-up-3"} 2`,
		`kvatlas_unsupported_fields_total{api="chat",field="other"} 936`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("missing: %s", line)
		}
	}
}
