package enginehttp

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// TestNames reads the model lists of engines, and of a proxy before several engines.
func TestNames(t *testing.T) {
	const base = `{"id":"meta-llama/Llama-3.1-8B-Instruct","root":"/m","parent":null}`
	for list, want := range map[string]Names{
		``:   {},
		base: {Model: "meta-llama/Llama-3.1-8B-Instruct"},
		base + `,{"id":"b","root":"/m","parent":null},{"id":"a","root":"/m"}`: {
			Model: "meta-llama/Llama-3.1-8B-Instruct", Aliases: []string{"a", "b"}},
		base + `,{"id":"sql","root":"/adapters/sql","parent":"meta-llama/Llama-3.1-8B-Instruct"},
			{"id":"chat","root":"/adapters/chat","parent":"by hand"}`: {
			Model: "meta-llama/Llama-3.1-8B-Instruct", Adapters: []string{"chat", "sql"}},
		`{"id":"sql","root":"x","parent":"m"},{"id":"m"},{"id":"n"}`: {
			Model: "m", Aliases: []string{"n"}, Adapters: []string{"sql"}},
		base + `,{"id":"qwen","root":"/q"},{"id":"of qwen","root":"x","parent":"qwen"}`: {
			Model: "meta-llama/Llama-3.1-8B-Instruct"},
	} {
		got, err := engineOf(t, map[string]string{"/v1/models": `{"object":"list","data":[` + list + `]}`}).Names(t.Context())
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v\nwant %+v", list, got, err, want)
		}
	}
	if got, err := engineOf(t, nil).Names(t.Context()); err != nil || !reflect.DeepEqual(got, Names{}) {
		t.Errorf("without the path: %+v, %v", got, err)
	}
	if got, err := engineOf(t, map[string]string{"/v1/models": "<html>"}).Names(t.Context()); !errors.Is(err, ErrUnknown) {
		t.Errorf("no JSON: %+v, %v", got, err)
	}
}

// TestSleep reads the states of a sleeping and waking engine, in all forms of reports.
func TestSleep(t *testing.T) {
	metric := func(engine, awake, offloaded, discarded string) string {
		labels := `vllm:engine_sleep_state{engine="` + engine + `",model_name="a}b",sleep_state=`
		return labels + `"awake"} ` + awake + "\n" + labels + `"weights_offloaded"} ` + offloaded + "\n" + labels +
			`"discard_all"} ` + discarded + "\n"
	}
	for name, c := range map[string]struct {
		metrics, route string
		asleep, known  bool
	}{
		"awake":           {metric("0", "1.0", "0.0", "0.0"), `{"is_sleeping":false}`, false, true},
		"level 1":         {metric("0", "0.0", "1.0", "0.0"), `{"is_sleeping":true}`, true, true},
		"level 2":         {metric("0", "0.0", "0.0", "1.0"), "", true, true},
		"level 0":         {metric("0", "0.0", "0.0", "0.0"), "", true, true},
		"one of two":      {metric("0", "1", "0", "0") + metric("1", "0", "1", "0"), "", true, true},
		"partly awake":    {metric("0", "1.0", "0.0", "0.0"), `{"is_sleeping":true}`, true, true},
		"the route alone": {"", `{"is_sleeping":true}`, true, true},
		"metrics alone":   {metric("0", "1.0", "0.0", "0.0"), "", false, true},
		"neither":         {"", "", false, false},
		"other metrics":   {"vllm:num_requests_running 0\n", `{"detail":"Not Found"}`, false, false},
		"switched off":    {"# HELP vllm:engine_sleep_state x\n", "", false, false},
		"a whole number":  {strings.ReplaceAll(metric("0", "1.0", "0.0", "0.0"), "1.0", "1"), "", false, true},
	} {
		answers := map[string]string{}
		if c.metrics != "" {
			answers["/metrics"] = c.metrics
		}
		if c.route != "" {
			answers["/is_sleeping"] = c.route
		}
		check := engineOf(t, answers).NewSleepCheck()
		for range lookAgain + 2 {
			if asleep, known, err := check.Ask(t.Context()); err != nil || asleep != c.asleep || known != c.known {
				t.Errorf("%s: asleep %v, reported %v, %v; want %v, %v", name, asleep, known, err, c.asleep, c.known)
				break
			}
		}
	}
	// The engine adds the route later. A later check finds it.
	answers := map[string]string{}
	check := engineOf(t, answers).NewSleepCheck()
	_, _, _ = check.Ask(t.Context())
	answers["/is_sleeping"] = `{"is_sleeping":true}`
	for i := range lookAgain + 1 {
		asleep, _, err := check.Ask(t.Context())
		if want := i == lookAgain; asleep != want && i >= lookAgain || err != nil {
			t.Errorf("check %d: asleep %v, %v", i, asleep, err)
		}
	}
}
