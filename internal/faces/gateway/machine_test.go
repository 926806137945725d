package gateway

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/protobuf/types/known/structpb"
)

func value(v any) *structpb.Value {
	x, err := structpb.NewValue(v)
	if err != nil {
		panic(err)
	}
	return x
}

func metadataOf(space, key string, v any) *corev3.Metadata {
	return &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
		space: {Fields: map[string]*structpb.Value{key: value(v)}}}}
}

func httpHeaders(end bool, pairs ...string) *extprocv3.HttpHeaders {
	h := &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{}, EndOfStream: end}
	for i := 0; i+1 < len(pairs); i += 2 {
		h.Headers.Headers = append(h.Headers.Headers,
			&corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return h
}

var modes = map[string]*extprocv3.ProtocolConfiguration{
	"duplex": {RequestBodyMode: modev3.ProcessingMode_FULL_DUPLEX_STREAMED,
		ResponseBodyMode: modev3.ProcessingMode_FULL_DUPLEX_STREAMED},
	"buffered": {RequestBodyMode: modev3.ProcessingMode_BUFFERED, ResponseBodyMode: modev3.ProcessingMode_STREAMED},
	"streamed": {RequestBodyMode: modev3.ProcessingMode_STREAMED}, "none": {}, "unsaid": nil,
}

// message parses a line of testdata/streams.txt.
func message(t *testing.T, words []string) *extprocv3.ProcessingRequest {
	t.Helper()
	r := &extprocv3.ProcessingRequest{}
	end := words[len(words)-1] == "end"
	if end {
		words = words[:len(words)-1]
	}
	text := []byte(strings.Join(words[1:], " "))
	switch words[0] {
	case "headers":
		mode, known := modes[words[1]]
		if !known {
			t.Fatalf("no mode %q", words[1])
		}
		r.ProtocolConfig = mode
		h := httpHeaders(end, ":method", "POST", "content-type", "application/json")
		if len(words) > 2 && words[2][0] == '/' {
			h = httpHeaders(end, ":method", "POST", ":path", words[2], "content-type", "application/json")
		} else if len(words) > 2 {
			r.MetadataContext = metadataOf(subsetSpace, subsetKey, words[2])
		}
		r.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: h}
	case "body":
		r.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: text, EndOfStream: end}}
	case "trailers":
		r.Request = &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}
	case "response":
		h := httpHeaders(end, ":status", "200")
		if i := slices.Index(words, "status"); i > 0 {
			h = httpHeaders(end, ":status", words[i+1])
			words = words[:i]
		}
		if len(words) > 1 {
			r.MetadataContext = metadataOf(destinationSpace, servedKey, words[1])
		}
		r.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: h}
	case "response-body":
		r.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: text,
			EndOfStream: end}}
	case "response-trailers":
		r.Request = &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}
	case "nothing":
	default:
		t.Fatalf("no message %q", words[0])
	}
	return r
}

// common formats a reply for headers or a body.
func common(c *extprocv3.CommonResponse) (text string) {
	for _, h := range c.GetHeaderMutation().GetSetHeaders() {
		text += fmt.Sprintf(" %s=%s", strings.TrimPrefix(h.Header.Key, "x-"), h.Header.RawValue)
	}
	chosen := strings.Contains(text, "gateway-destination-endpoint=")
	if removed := c.GetHeaderMutation().GetRemoveHeaders(); chosen && !slices.Equal(removed, sidecarHeaders) {
		text += fmt.Sprintf(" removes %q", removed) // every choice removes the headers of clients
	}
	if b := c.GetBodyMutation().GetBody(); b != nil {
		text += " replaced by " + string(b)
	}
	if b := c.GetBodyMutation().GetStreamedResponse(); b != nil {
		if text += " "; len(b.Body) > 40 {
			text += fmt.Sprintf("(%d bytes)", len(b.Body))
		} else {
			text += string(b.Body)
		}
		if b.EndOfStream {
			text += " end"
		}
	}
	return text
}

// transcript formats effects as lines of the transcript.
func transcript(e Effects) (list []string) {
	say := func(is bool, format string, args ...any) {
		if is {
			list = append(list, fmt.Sprintf(format, args...))
		}
	}
	say(len(e.Failed) > 0, "failed %s", strings.Join(e.Failed, " "))
	say(e.Served != "", "served %s", e.Served)
	say(e.PrefillComplete, "prefill complete")
	say(e.CachedTokens > 0, "cached %d", e.CachedTokens)
	say(e.Result != "", "result %s", e.Result)
	say(e.Free, "free")
	for _, r := range e.Replies {
		meta := r.DynamicMetadata.GetFields()[destinationSpace].GetStructValue().GetFields()[destination].GetStringValue()
		if meta != "" {
			meta = " metadata=" + meta
		}
		switch q := r.Response.(type) {
		case *extprocv3.ProcessingResponse_RequestHeaders:
			say(true, "<- headers%s%s", common(q.RequestHeaders.Response), meta)
		case *extprocv3.ProcessingResponse_RequestBody:
			say(true, "<- body%s%s", common(q.RequestBody.Response), meta)
		case *extprocv3.ProcessingResponse_RequestTrailers:
			say(true, "<- trailers")
		case *extprocv3.ProcessingResponse_ResponseHeaders:
			say(true, "<- response%s", common(q.ResponseHeaders.Response))
		case *extprocv3.ProcessingResponse_ResponseBody:
			say(true, "<- response-body%s", common(q.ResponseBody.Response))
		case *extprocv3.ProcessingResponse_ResponseTrailers:
			say(true, "<- response-trailers")
		case *extprocv3.ProcessingResponse_ImmediateResponse:
			i := q.ImmediateResponse
			say(true, "<- status %d %s", i.Status.Code, i.Body)
		}
	}
	if a := e.Ask; a != nil {
		text := "(no body)"
		if a.Body != nil {
			text = string(a.Body)
		}
		if len(text) > 40 {
			text = fmt.Sprintf("(%d bytes)", len(text))
		}
		say(true, "ask %s", text)
		say(a.Subset != nil, "of %q", a.Subset)
	}
	say(e.Err != nil, "error %v", e.Err)
	return list
}

// TestStreams plays testdata/streams.txt: lines with a leading "> " are messages, the other lines are the effects.
func TestStreams(t *testing.T) {
	text, err := os.ReadFile("testdata/streams.txt")
	if err != nil {
		t.Fatal(err)
	}
	var m *Machine
	var got []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "# ") || line == "":
			if line != "" {
				m = NewMachine()
			}
			got = append(got, line)
			continue
		case words[0] != ">":
			continue // effects are compared below
		}
		got = append(got, line)
		var e Effects
		switch words = words[1:]; words[0] {
		case "chosen":
			c := &Choice{Addresses: strings.Split(words[1], ",")}
			if len(words) > 2 {
				c.Rank = words[2]
			}
			e = m.Chosen(c)
		case "refused":
			e = m.Refuse(api.Errorf(api.Code(words[1]), "because"))
		case "eof":
			e = m.End()
		default:
			if len(words) > 2 && words[1] == "bytes" {
				n := 0
				if _, err := fmt.Sscan(words[2], &n); err != nil {
					t.Fatal(err)
				}
				words = append([]string{words[0], strings.Repeat("x", n)}, words[3:]...)
			}
			e = m.Step(message(t, words))
		}
		got = append(got, transcript(e)...)
	}
	if out := strings.Join(got, "\n") + "\n"; out != string(text) {
		t.Errorf("got\n%s", out)
	}
}

// FuzzStreams sends messages in any order, with choices and refusals at any time. A booking is freed once. The proxy
// receives no reply for a part of the request that it has not sent.
func FuzzStreams(f *testing.F) {
	f.Add([]byte{0, 12, 5, 15, 20, 30})
	f.Add([]byte{1, 12, 15, 20, 30, 35})
	f.Add([]byte{2, 5, 20})
	names := []string{"duplex", "buffered", "streamed", "none", "unsaid"}
	f.Fuzz(func(t *testing.T, script []byte) {
		m := NewMachine()
		booked, freed := false, 0
		sent := map[string]int{}
		do := func(e Effects) {
			if e.Free {
				freed++
			}
			if (e.PrefillComplete || e.CachedTokens > 0 || e.Served != "") && (!booked || freed > 1) {
				t.Fatal("effects of a request without a booking:", transcript(e))
			}
			for _, line := range transcript(e) {
				if what, ok := strings.CutPrefix(line, "<- "); ok {
					what, _, _ = strings.Cut(what, " ")
					if what != "status" && sent[what] == 0 {
						t.Fatalf("%s, which was not sent", line)
					}
				}
			}
			if e.Ask != nil && booked {
				t.Fatal("a second choice")
			}
		}
		for _, b := range script {
			end := ""
			if b%2 == 1 {
				end = "end"
			}
			switch b % 13 / 2 {
			case 0:
				sent["headers"]++
				do(m.Step(message(t, strings.Fields("headers "+names[int(b/26)%len(names)]+" "+end))))
			case 1:
				sent["body"]++
				do(m.Step(message(t, strings.Fields("body x "+end))))
			case 2:
				sent["trailers"]++
				do(m.Step(message(t, []string{"trailers"})))
			case 3:
				sent["response"]++
				do(m.Step(message(t, strings.Fields("response other:1 "+end))))
			case 4:
				sent["response-body"]++
				do(m.Step(message(t, strings.Fields(`response-body "cached_tokens":7} `+end))))
			case 5:
				_, may := m.phase.(*choosing)
				do(m.Chosen(&Choice{Addresses: []string{"a:1"}}))
				booked = booked || may
			default:
				do(m.Refuse(api.Errorf(api.CodeBusy, "x")))
			}
		}
		do(m.End())
		do(m.End())
		if want := map[bool]int{true: 1}[booked]; freed != want {
			t.Fatalf("booked: %v, and freed %d times", booked, freed)
		}
	})
}

// TestResponseID reads the id of a response from answers in all splits, and never from the text of a chat.
func TestResponseID(t *testing.T) {
	for text, want := range map[string]string{
		`{"id":"resp_a-1","object":"response"}`:                                       "resp_a-1",
		"event: response.created\ndata: {\"response\": {\"id\" : \"resp_b\"}}\n\n":    "resp_b",
		`{"id":"resp_a","output":[{"id":"resp_c"}]}`:                                  "resp_a",
		`{"id":"chatcmpl-1","choices":[{"message":{"content":"\"id\":\"resp_x\""}}]}`: "",
		`{"id":"resp_`: "",
		`{"x":"` + strings.Repeat("x", maxHead) + `","id":"resp_late"}`: "",
		"": "",
	} {
		for step := 1; step <= len(text)+1; step += 1 + step/3 {
			var r responseID
			var got []string
			for at := 0; at < len(text); at += step {
				if id := r.read([]byte(text[at:min(at+step, len(text))])); id != "" {
					got = append(got, id)
				}
			}
			if strings.Join(got, " ") != want {
				t.Fatalf("%.80s in pieces of %d: %q, want %q", text, step, got, want)
			}
		}
	}
}

// TestUsage reads the numbers of tokens from answers in all splits, and never from the text of an answer.
func TestUsage(t *testing.T) {
	type numbers struct{ reused, prompt, completion uint64 }
	for text, want := range map[string]numbers{
		`{"usage":{"prompt_tokens":64,"total_tokens":70,"completion_tokens":6,` +
			`"prompt_tokens_details":{"cached_tokens":48}}}`: {48, 64, 6},
		"data: {\"x\":[]}\n\ndata: {\"usage\":{\"cached_tokens\" : 123 }}\n": {reused: 123},
		// continuous usage: the last event has the sum of a batch
		"data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n" +
			"data: {\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":4}}\n": {0, 8, 4},
		`{"usage":{"input_tokens":64,"input_tokens_details":{"cached_tokens":48},"output_tokens":5}}`: {48, 64, 5},
		`{"usage":{"input_tokens":3,"cache_read_input_tokens":48,"cache_creation_input_tokens":9}}`:   {48, 60, 0},
		`{"usage":{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":null}}`:               {0, 3, 2},
		`{"usage":{"input_tokens":0,"output_tokens":2,"cache_read_input_tokens":16}}`:                 {16, 16, 2},
		// vLLM repeats the prompt's numbers at the end of a stream, and SGLang does not
		"event: message_start\ndata: {\"usage\":{\"input_tokens\":20,\"output_tokens\":0}}\n\nevent: message_delta\n" +
			"data: {\"usage\":{\"input_tokens\":4,\"output_tokens\":2,\"cache_read_input_tokens\":16}}\n": {16, 20, 2},
		"event: message_start\ndata: {\"usage\":{\"input_tokens\":4,\"cache_read_input_tokens\":16}}\n\n" +
			"event: message_delta\ndata: {\"usage\":{\"output_tokens\":2}}\n": {16, 20, 2},
		`{"text":"\"cache_read_input_tokens\":9}"}`:              {},
		`{"text":"\"prompt_tokens\":9}","prompt_tokens":4}`:      {prompt: 4},
		`{"tokens":1,"my_prompt_tokens":2,"xprompt_tokens": 3 }`: {},
		`{"cached_tokens":5,"x":1,"cached_tokens":7}`:            {reused: 7},
		`{"text":"\"cached_tokens\":9}"}`:                        {},
		`{"cached_tokens":null}`:                                 {},
		`{"cached_tokens":"8"}`:                                  {},
		`{"cached_tokens":99999999999999999999999999}`:           {},
		`{"prompt_tokens":99999999999,"input_tokens":-5}`:        {},
		`{"prompt_tokens":-5,"completion_tokens":1e3}`:           {},
		`{"prompt_tokens":1.5,"completion_tokens":true}`:         {},
		`{"cached_tokens"`:                                       {},
		`{"cached_token`:                                         {},
		"":                                                       {},
	} {
		for step := 1; step <= len(text)+1; step++ {
			var u usage
			var got numbers
			for at := 0; at < len(text); at += step {
				if n, some := u.read([]byte(text[at:min(at+step, len(text))])); some {
					got.reused = n
				}
			}
			if got.prompt, got.completion = u.prompt(), u.completion(); got != want {
				t.Fatalf("%s in pieces of %d: %+v, want %+v", text, step, got, want)
			}
		}
	}
}

// TestQuotaRefusal refuses a request beyond a quota: the answer has the time of the next try.
func TestQuotaRefusal(t *testing.T) {
	failure := api.Errorf(api.CodeQuota, "the quota is used")
	failure.Quota = &api.QuotaState{Tenant: "x-team:a", RetryAfterMS: 2001}
	m := NewMachine()
	m.phase = &choosing{}
	answer := m.Refuse(failure).Replies[0].GetImmediateResponse()
	found := ""
	for _, h := range answer.Headers.SetHeaders {
		if h.Header.Key == "retry-after" {
			found = string(h.Header.RawValue)
		}
	}
	if answer.Status.Code != 429 || found != "3" || !strings.Contains(string(answer.Body), "quota_exceeded") {
		t.Errorf("%v, retry after %q, %s", answer.Status, found, answer.Body)
	}
}
