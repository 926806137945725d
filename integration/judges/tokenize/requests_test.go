//go:build judges

package tokenize

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// pick returns one of several values.
func pick[T any](rng *rand.Rand, list ...T) T { return list[rng.IntN(len(list))] }

// maybe returns a JSON field with a comma before it, or nothing.
func maybe(rng *rand.Rand, field string) string {
	if rng.IntN(3) == 0 {
		return "," + field
	}
	return ""
}

// cacheControl is a field that clients of Anthropic add to blocks and tools.
const cacheControl = `"cache_control":{"type":"ephemeral"}`

// image is a block of an image. Engines of text models refuse the URL.
const image = `{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBORw0KGgo="}}`

// textBlock returns a text block of Anthropic.
func textBlock(rng *rand.Rand) string {
	return `{"type":"text","text":` + quote(phrase(rng)) + maybe(rng, cacheControl) + maybe(rng, `"citations":null`) + `}`
}

func list(rng *rand.Rand, most int, one func() string) string {
	var items []string
	for range rng.IntN(most + 1) {
		items = append(items, one())
	}
	return "[" + strings.Join(items, ",") + "]"
}

// messagesRequest returns a request of Anthropic's Messages API. With images, engines cannot render it as a text.
func messagesRequest(rng *rand.Rand, images bool) string {
	var msgs []string
	add := func(role, content string) {
		msgs = append(msgs, fmt.Sprintf(`{"role":%q,"content":%s}`, role, content))
	}
	calls := 0
	results := func() string {
		var blocks []string
		for i := range calls {
			content := pick(rng, quote(phrase(rng)), list(rng, 2, func() string {
				switch {
				case images && rng.IntN(3) == 0:
					return image
				case rng.IntN(6) == 0:
					return fmt.Sprintf(`{"type":"tool_reference","tool_name":"f%d"}`, rng.IntN(3))
				}
				return textBlock(rng)
			}))
			if rng.IntN(8) == 0 {
				content = "null"
			}
			blocks = append(blocks, fmt.Sprintf(`{"type":"tool_result","tool_use_id":"toolu_%d","content":%s%s}`, i, content,
				maybe(rng, `"is_error":false`)))
		}
		calls = 0
		if rng.IntN(2) == 0 {
			blocks = append(blocks, textBlock(rng))
		}
		return "[" + strings.Join(blocks, ",") + "]"
	}
	for range 1 + rng.IntN(4) {
		switch {
		case calls > 0:
			add("user", results())
		case images && rng.IntN(2) == 0:
			add("user", "["+textBlock(rng)+","+image+","+textBlock(rng)+"]")
		default:
			add("user", pick(rng, quote(phrase(rng)), list(rng, 3, func() string { return textBlock(rng) })))
		}
		if rng.IntN(8) == 0 {
			add("system", pick(rng, quote(phrase(rng)), list(rng, 2, func() string { return textBlock(rng) }),
				`[{"type":"text","text":"x-anthropic-billing-header: cch=1;"},{"type":"text","text":"Mind."}]`,
				`[{"type":"tool_addition","tool":{"type":"tool_definition","definition":{"name":"g","input_schema":{}}}}]`,
				`[{"type":"tool_removal","tool":{"type":"tool_reference","name":"f0"}}]`))
		}
		if rng.IntN(5) == 0 {
			continue
		}
		var blocks []string
		if rng.IntN(3) == 0 {
			blocks = append(blocks, `{"type":"thinking","thinking":`+quote(phrase(rng))+`,"signature":"c2ln"}`)
		}
		if rng.IntN(8) == 0 {
			blocks = append(blocks, `{"type":"redacted_thinking","data":"eHh4"}`)
		}
		if rng.IntN(3) > 0 {
			blocks = append(blocks, textBlock(rng))
		}
		if rng.IntN(2) == 0 {
			calls = 1 + rng.IntN(2)
			for i := range calls {
				blocks = append(blocks, fmt.Sprintf(`{"type":"tool_use","id":"toolu_%d","name":"f%d","input":%s}`, i, rng.IntN(3),
					object(rng, 2)))
			}
		}
		if calls == 0 && rng.IntN(3) == 0 {
			add("assistant", quote(phrase(rng)))
		} else {
			add("assistant", "["+strings.Join(blocks, ",")+"]")
		}
	}
	r := `"messages":[` + strings.Join(msgs, ",") + `]`
	if rng.IntN(3) > 0 {
		r += `,"system":` + pick(rng, quote(phrase(rng)), list(rng, 3, func() string { return textBlock(rng) }),
			`[{"type":"text","text":"x-anthropic-billing-header: cch=2;"},{"type":"text","text":"You are Claude Code.",`+
				cacheControl+`}]`, `"x-anthropic-billing-header: a\nb"`)
	}
	if rng.IntN(2) == 0 {
		n := -1
		r += `,"tools":` + list(rng, 3, func() string {
			n++
			s := schema(rng, 2)
			if rng.IntN(3) == 0 {
				s = pick(rng, `{}`, `{"properties":`+properties(rng, 2)+`}`, ` { "required" : [ "a" ] } `)
			}
			return fmt.Sprintf(`{"name":"f%d","input_schema":%s%s%s%s%s}`, n, s, maybe(rng, `"description":`+quote(phrase(rng))),
				maybe(rng, `"strict":true`), maybe(rng, `"defer_loading":true`), maybe(rng, cacheControl))
		})
	}
	return "{" + r + maybe(rng, `"thinking":`+pick(rng, `{"type":"disabled"}`, `{"type":"enabled","budget_tokens":1024}`,
		`{"type":"adaptive"}`)) + maybe(rng, `"output_config":{"effort":`+pick(rng, `"low"`, `"medium"`, `"max"`)+`}`) +
		maybe(rng, `"chat_template_kwargs":{"enable_thinking":`+pick(rng, "true", "false")+`}`) +
		maybe(rng, `"metadata":{"user_id":"u"}`) + "}"
}

// responsesRequest returns a request of OpenAI's Responses API.
func responsesRequest(rng *rand.Rand, images bool) string {
	part := func() string {
		if images && rng.IntN(3) == 0 {
			return `{"type":"input_image","image_url":"data:image/png;base64,iVBORw0KGgo="` + maybe(rng, `"detail":"auto"`) + `}`
		}
		return `{"type":"input_text","text":` + quote(phrase(rng)) + `}`
	}
	content := func() string { return pick(rng, quote(phrase(rng)), list(rng, 3, part)) }
	var items []string
	for range 1 + rng.IntN(4) {
		items = append(items, fmt.Sprintf(`{"role":%q,"content":%s%s}`,
			pick(rng, "user", "user", "user", "developer", "system"), content(), maybe(rng, `"type":"message"`)))
		if rng.IntN(5) == 0 {
			continue
		}
		if rng.IntN(3) == 0 {
			items = append(items, `{"type":"reasoning","summary":`+pick(rng, `[]`, `[{"type":"summary_text","text":`+
				quote(phrase(rng))+`}]`)+maybe(rng, `"content":[{"type":"reasoning_text","text":`+quote(phrase(rng))+`}]`)+
				maybe(rng, `"id":"rs_1"`)+maybe(rng, `"encrypted_content":null`)+`}`)
		}
		if rng.IntN(3) > 0 {
			items = append(items, pick(rng,
				`{"type":"message","role":"assistant","content":[{"type":"output_text","text":`+quote(phrase(rng))+
					maybe(rng, `"annotations":[]`)+`}]`+maybe(rng, `"id":"msg_1"`)+maybe(rng, `"status":"completed"`)+`}`,
				`{"role":"assistant","content":`+quote(phrase(rng))+`}`,
				`{"type":"message","role":"assistant","content":[{"type":"output_text","text":"one"},`+
					`{"type":"output_text","text":"two"}]}`,
				`{"role":"assistant","content":[{"type":"input_text","text":"given"}]}`))
		}
		if rng.IntN(2) == 0 {
			n := 1 + rng.IntN(2)
			for i := range n {
				items = append(items, pick(rng,
					fmt.Sprintf(`{"type":"function_call","call_id":"call_%d","name":"f%d","arguments":%s%s%s}`, i, rng.IntN(3),
						quote(pick(rng, object(rng, 2), object(rng, 2), "{", "", "[]")), maybe(rng, `"id":"fc_1"`),
						maybe(rng, `"namespace":"ns"`)),
					fmt.Sprintf(`{"type":"custom_tool_call","call_id":"call_%d","name":"c","input":%s}`, i, quote(phrase(rng)))))
			}
			for i := range n {
				items = append(items, fmt.Sprintf(`{"type":"function_call_output","call_id":"call_%d","output":%s%s}`, i, content(),
					maybe(rng, `"status":"completed"`)))
			}
		}
	}
	if rng.IntN(10) == 0 {
		items = append(items, `{"type":"message","role":"assistant","status":"in_progress","content":[{"type":"output_text","text":`+
			quote("so "+phrase(rng))+`}]}`)
	}
	r := `"input":[` + strings.Join(items, ",") + `]`
	if rng.IntN(6) == 0 {
		r = `"input":` + quote(phrase(rng))
	}
	r += maybe(rng, `"instructions":`+quote(phrase(rng)))
	if rng.IntN(2) == 0 {
		n := -1
		r += `,"tools":` + list(rng, 3, func() string {
			n++
			function := fmt.Sprintf(`{"type":"function","name":"f%d"%s%s%s}`, n, maybe(rng, `"description":`+quote(phrase(rng))),
				maybe(rng, `"parameters":`+schema(rng, 2)), maybe(rng, `"strict":`+pick(rng, "true", "false", "null")))
			return pick(rng, function, function, function, `{"type":"web_search"}`,
				`{"type":"custom","name":"c"`+maybe(rng, `"description":"d"`)+`}`,
				`{"type":"namespace","name":"ns","description":"d","tools":[`+function+`]}`)
		})
	}
	return "{" + r + maybe(rng, `"reasoning":{"effort":`+pick(rng, `"none"`, `"low"`, `"high"`)+`}`) +
		maybe(rng, `"chat_template_kwargs":{"enable_thinking":`+pick(rng, "true", "false")+`}`) +
		maybe(rng, `"store":false`) + maybe(rng, `"truncation":"disabled"`) +
		maybe(rng, `"text":{"format":{"type":"text"}}`) + "}"
}
