package tokenize

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Comparison compares the results of two sources for one text.
type Comparison struct {
	Text    string  `json:"text"`              // the beginning of the text
	Here    Outcome `json:"here"`              // [OK], or the reason for missing tokens
	There   Outcome `json:"there"`             // the same for the server
	Tokens  int     `json:"tokens"`            // number of the server's tokens
	Differs bool    `json:"differs,omitempty"` // both have tokens, and the tokens differ
	At      int     `json:"at,omitempty"`      // index of the first difference
	Error   string  `json:"error,omitempty"`   // of either source
}

// Against returns a source that queries one server, as given by kind.
func Against(kind Kind, url, model, token string) (*Remote, error) {
	base, err := baseURL(url)
	if err != nil {
		return nil, err
	}
	return &Remote{Kind: kind, Model: model, Token: token, URLs: func() ([]string, error) { return []string{base}, nil },
		HTTP: dial.Client(nil, 0), Hedge: time.Hour, Budget: &rpc.Budget{}}, nil
}

// Source returns the tokenizer of a model's texts, without time limits and cache; nil without a tokenizer.
func (s *Service) Source(model string) Tokenizer {
	if x := s.sourceOf(model); x != nil {
		return x.tokenizer
	}
	return nil
}

// Compare tokenizes texts with two sources. Only the context's error ends it early.
func Compare(ctx context.Context, here, there Tokenizer, texts []api.Text) ([]Comparison, error) {
	list := make([]Comparison, len(texts))
	for i := range texts {
		c := &list[i]
		c.Text = beginning(&texts[i])
		own, err := here.Tokenize(ctx, &texts[i])
		c.Here = OutcomeOf(err)
		theirs, failed := there.Tokenize(ctx, &texts[i])
		c.There = OutcomeOf(failed)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		c.Tokens = len(theirs.IDs)
		switch {
		case err != nil:
			c.Error = err.Error()
		case failed != nil:
			c.Error = failed.Error()
		case !slices.Equal(own.IDs, theirs.IDs):
			c.Differs = true
			for c.At < min(len(own.IDs), len(theirs.IDs)) && own.IDs[c.At] == theirs.IDs[c.At] {
				c.At++
			}
		}
	}
	return list, nil
}

// shown bounds the bytes of a text in a comparison.
const shown = 48

func beginning(t *api.Text) string {
	text := t.Prompt
	if t.Messages != nil {
		text = string(t.Messages)
	}
	if len(text) > shown {
		n := shown
		for !utf8.RuneStart(text[n]) {
			n--
		}
		text = text[:n] + "…"
	}
	return text
}

// samples are prompts in many scripts, with difficult boundaries of words, digits and white space.
var samples = []string{
	"The quick brown fox jumps over the lazy dog. It's what they'd've said: I'M, we'LL, don't!",
	"Straße, naïve café, œuvre, Ørsted, Łódź, İstanbul, ﬁn, ſt",
	"Съешь же ещё этих мягких французских булок, да выпей чаю",
	"Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
	"视野无限广，窗外有蓝天。他说：「你好！」１２３ＡＢＣ",
	"いろはにほへと ちりぬるを。コンピューター・ゲーム",
	"키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다",
	"نص حكيم له سر قاطع وذو شأن عظيم ٣٤٥", "דג סקרן שט בים מאוכזב", "ऋषियों को सताने वाले दुष्ट राक्षसों", "เป็นมนุษย์สุดประเสริฐ",
	"0 1 12 123 1234 12345 3.14159 1,000,000 0xff 1e-9 ½ Ⅷ ²",
	"e\u0301 \u0065\u0327\u0301 \u212b \ufb01 \u00a0\u2003\u3000|\u200b|\u200d|\ufeff",
	"👩‍👩‍👧🏽 🇩🇪 ❤️ 😀", "a\n\nb\r\n c\t\td   e \n \n", "     ", "\n",
	"func main() {\n\tfmt.Println(\"x\", `y`) // → ¬∀\n}\n", "{\"a\": [1, 2.50, null], \"b\": \"\\u00e9\"}",
	"<|im_start|>user\nx<|im_end|>",
	"<s>[INST] x [/INST]</s> <|endoftext|> <|eot_id|>", "https://example.org/a?b=c&d=%20#e x@y.z", "!!??...---___===***",
}

// sampleTools are the tools of samples.
const sampleTools = `[{"type":"function","function":{"name":"weather","description":"Weather of a \"city\" <now>",` +
	`"parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","enum":[3,1]}},` +
	`"required":["city"]}}}]`

// sampleChats are the messages of samples.
var sampleChats = []string{
	`[{"role":"user","content":"Hello, wörld"}]`,
	`[{"role":"system","content":" Be brief.\n"},{"role":"user","content":" Hi "}]`,
	`[{"role":"user","content":"1+1?"},{"role":"assistant","content":"2"},{"role":"user","content":"你好\n"}]`,
	`[{"role":"user","content":[{"type":"text","text":"one part"}]}]`,
	`[{"role":"user","content":[{"type":"text","text":"first"},{"type":"text","text":"second"}]}]`,
	`[{"role":"user","content":"q"},{"role":"assistant","content":"<think>\nwhy\n</think>\n\na"},{"role":"user","content":"r"}]`,
	`[{"role":"user","content":"q"},{"role":"assistant","reasoning_content":"why","content":"a"},{"role":"user","content":"r"}]`,
	`[{"role":"user","content":"Weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"call00001",` +
		`"type":"function","function":{"name":"weather","arguments":"{\"days\": 3, \"city\": \"Zürich\"}"}}]},` +
		`{"role":"tool","tool_call_id":"call00001","content":"{\"t\": -1.50}"}]`,
}

// Samples returns texts for comparisons: prompts, and chats with and without tools, thinking and a generation prompt.
func Samples() (list []api.Text) {
	for _, text := range samples {
		list = append(list, api.Text{Prompt: text})
	}
	no, yes := false, true
	for _, messages := range sampleChats {
		m := api.Value(messages)
		list = append(list, api.Text{Messages: m}, api.Text{Messages: m, Tools: api.Value(sampleTools)},
			api.Text{Messages: m, AddGenerationPrompt: &no},
			api.Text{Messages: m, ChatTemplateKwargs: api.Value(`{"enable_thinking":false}`)})
	}
	return append(list, api.Text{Messages: api.Value(`[{"role":"user","content":"q"},{"role":"assistant","content":"a b"}]`),
		AddGenerationPrompt: &no, ContinueFinalMessage: &yes})
}

// ReadText parses a line of a file of texts: a JSON object in the form of a request, or a prompt.
func ReadText(line []byte) (api.Text, error) {
	if len(line) == 0 || line[0] != '{' {
		return api.Text{Prompt: string(line)}, nil
	}
	var t api.Text
	if err := json.Unmarshal(line, &t); err != nil {
		return t, fmt.Errorf("the line begins with { and is not a request: %w", err)
	}
	return t, nil
}

// TextsToCompare returns [Samples], and the texts in a file with a text on each line. An empty path adds nothing.
func TextsToCompare(path string) ([]api.Text, error) {
	list := Samples()
	if path == "" {
		return list, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for i, line := range bytes.Split(data, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		t, err := ReadText(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		list = append(list, t)
	}
	return list, nil
}

// Verdict describes the result of a comparison.
func (c *Comparison) Verdict() string {
	switch {
	case c.Here != OK:
		return "refused here"
	case c.There == Refused:
		return "refused there"
	case c.There != OK:
		return "NOT COMPARED"
	case c.Differs:
		return fmt.Sprintf("DIFFERS from token %d on", c.At)
	}
	return "same"
}

// Tally counts the verdicts of comparisons. All differences count as "differ".
func Tally(list []Comparison) map[string]int {
	counts := map[string]int{}
	for i := range list {
		if c := &list[i]; c.Differs {
			counts["differ"]++
		} else {
			counts[c.Verdict()]++
		}
	}
	return counts
}

// Disagreement returns an error if texts have different tokens, or if no text could be compared.
func Disagreement(list []Comparison) error {
	counts := Tally(list)
	same, differ, not := counts["same"], counts["differ"], counts["NOT COMPARED"]
	switch {
	case differ > 0:
		return fmt.Errorf("%d texts have other tokens there: the model, the template or the server's settings differ; "+
			"give the model a render or tokenize URL", differ)
	case not > 0 || same == 0:
		return fmt.Errorf("%d texts could be compared, and %d not: read the server's errors above", same, not)
	}
	return nil
}
