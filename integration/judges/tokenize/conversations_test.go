//go:build judges

package tokenize

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// words are the parts of random phrases.
var words = []string{"", "hello", " two words ", "\n",
	"line\nline\n", "<think>\nwhy\n</think>\n\nanswer", "</think>", "<tool_response>x</tool_response>",
	"é中文字", "👩‍👧 \u00a0", "<|im_end|>", "{\"a\": 1}", "'quoted' \"twice\" \\n", "\t tab\r\n", "<b>&amp;</b>",
	"x</think>y</think>z", "  ", "0", "/nothink", "\u2028\u0085end\x1c"}

func phrase(rng *rand.Rand) string {
	var b strings.Builder
	for range 1 + rng.IntN(3) {
		b.WriteString(words[rng.IntN(len(words))])
	}
	return b.String()
}

func quote(s string) string { b, _ := json.Marshal(s); return string(b) }

// value is any JSON.
func value(rng *rand.Rand, depth int) string {
	switch n := rng.IntN(10); {
	case n < 3:
		return quote(phrase(rng))
	case n == 3:
		return fmt.Sprint(rng.IntN(2000) - 1000)
	case n == 4:
		return []string{"1.5", "0.1", "1e5", "1e22", "1.0", "-0.0", "1e-7", "123456789012345680", "3.14159",
			"100000000000000000000000"}[rng.IntN(10)]
	case n == 5:
		return []string{"true", "false", "null"}[rng.IntN(3)]
	case n < 8 && depth > 0:
		var list []string
		for range rng.IntN(3) {
			list = append(list, value(rng, depth-1))
		}
		return "[" + strings.Join(list, ",") + "]"
	case depth > 0:
		return object(rng, depth-1)
	}
	return quote(phrase(rng))
}

func object(rng *rand.Rand, depth int) string {
	names := []string{"zeta", "alpha", "city", "Unit", "items", "keys", "naïve", "a b", "10", "9"}
	rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	var list []string
	for i := range rng.IntN(4) {
		list = append(list, quote(names[i])+":"+value(rng, depth))
	}
	return "{" + strings.Join(list, ",") + "}"
}

// schema is a JSON schema.
func schema(rng *rand.Rand, depth int) string {
	kinds := []string{"string", "number", "integer", "boolean", "array", "object"}
	k := kinds[rng.IntN(len(kinds))]
	s := `"type":` + quote(k)
	if rng.IntN(2) == 0 {
		s += `,"description":` + quote(phrase(rng))
	}
	if k == "string" && rng.IntN(3) == 0 {
		s += `,"enum":["b","a","ü"]`
		if rng.IntN(2) == 0 {
			s += `,"default":"a"`
		}
	}
	if k == "array" && depth > 0 && rng.IntN(3) > 0 {
		s += `,"items":` + schema(rng, depth-1)
	}
	if k == "object" && depth > 0 {
		s += `,"properties":` + properties(rng, depth-1)
	}
	if k == "integer" && rng.IntN(3) == 0 {
		s += `,"default":` + fmt.Sprint(rng.IntN(9))
	}
	return "{" + s + "}"
}

func properties(rng *rand.Rand, depth int) string {
	names := []string{"zeta", "alpha", "city", "Unit", "naïve"}
	rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	var list []string
	for i := range rng.IntN(4) {
		list = append(list, quote(names[i])+":"+schema(rng, depth))
	}
	return "{" + strings.Join(list, ",") + "}"
}

// conversation returns the variables of a template as JSON, in the form of an engine.
func conversation(rng *rand.Rand) string {
	var msgs []string
	if rng.IntN(2) == 0 {
		msgs = append(msgs, fmt.Sprintf(`{"role":"system","content":%s}`, quote(phrase(rng))))
	}
	for range 1 + rng.IntN(4) {
		msgs = append(msgs, fmt.Sprintf(`{"role":"user","content":%s}`, quote(phrase(rng))))
		if rng.IntN(5) == 0 {
			continue
		}
		a := `"role":"assistant","content":` + quote(phrase(rng))
		if rng.IntN(3) == 0 {
			a += `,"reasoning_content":` + quote(phrase(rng))
		}
		n := 0
		if rng.IntN(3) == 0 {
			n = 1 + rng.IntN(2)
			var calls []string
			for i := range n {
				args := object(rng, 2)
				if rng.IntN(8) == 0 {
					args = quote(args)
				}
				calls = append(calls, fmt.Sprintf(`{"id":"call_%d","type":"function","function":{"name":"f%d","arguments":%s}}`,
					i, i, args))
			}
			a += `,"tool_calls":[` + strings.Join(calls, ",") + `]`
		}
		msgs = append(msgs, "{"+a+"}")
		for i := range n {
			msgs = append(msgs, fmt.Sprintf(`{"role":"tool","content":%s,"tool_call_id":"call_%d"}`, quote(phrase(rng)), i))
		}
		if n > 0 && rng.IntN(3) > 0 {
			msgs = append(msgs, fmt.Sprintf(`{"role":"assistant","content":%s}`, quote(phrase(rng))))
		}
	}
	v := `"messages":[` + strings.Join(msgs, ",") + `],"documents":null,"bos_token":"<bos>","eos_token":"<eos>"`
	if rng.IntN(2) == 0 {
		var tools []string
		for i := range 1 + rng.IntN(2) {
			tools = append(tools,
				fmt.Sprintf(`{"type":"function","function":{"name":"f%d","description":%s,"parameters":{"type":"object","properties":%s,"required":["city"]}}}`, i, quote(phrase(rng)), properties(rng, 2)))
		}
		v += `,"tools":[` + strings.Join(tools, ",") + `]`
	} else {
		v += `,"tools":null`
	}
	v += fmt.Sprintf(`,"add_generation_prompt":%v`, rng.IntN(2) == 0)
	if rng.IntN(3) == 0 {
		v += fmt.Sprintf(`,"enable_thinking":%v`, rng.IntN(2) == 0)
	}
	if rng.IntN(8) == 0 {
		v += `,"builtin_tools":["browser","code_interpreter","f0"]`
	}
	if rng.IntN(8) == 0 {
		v += `,"tools_in_user_message":false`
	}
	if rng.IntN(8) == 0 {
		v += `,"date_string":"01 Feb 2003"`
	}
	return "{" + v + "}"
}
