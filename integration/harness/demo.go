package harness

import (
	"encoding/json"
	"testing"
)

// DemoWithStore runs the demonstration with a shared store. Every answer must have exactly the stored and loadable
// blocks, and some blocks are loadable.
func DemoWithStore(t *testing.T, master string, env []string, args ...string) {
	t.Helper()
	args = append([]string{"demo", "--l3", "--json", "--engines", "2"}, args...)
	r := runWith(t, env, "indexer", args...)
	var got demoL3
	if err := json.Unmarshal([]byte(r.Stdout), &got); err != nil || r.Code != 0 {
		t.Fatalf("%v: %d, %v: %s%s", args, r.Code, err, r.Stdout, r.Stderr)
	}
	if got.AnswersChecked == 0 || got.AnswersEqual != got.AnswersChecked || got.L3.Master != master ||
		got.L3.PagesStored == 0 ||
		got.L3.TokensLoaded == 0 || got.L3.TokensLoaded > got.L3.TokensMissed || got.L3.Requests == 0 {
		t.Errorf("%v: %s", args, r.Stdout)
	}
}

type demoL3 struct {
	AnswersChecked int `json:"answers_checked"`
	AnswersEqual   int `json:"answers_equal"`
	L3             struct {
		Master       string
		PagesStored  int `json:"pages_stored"`
		TokensMissed int `json:"tokens_missed"`
		TokensLoaded int `json:"tokens_loaded"`
		Requests     int
	}
}
