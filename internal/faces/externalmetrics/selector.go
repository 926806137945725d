package externalmetrics

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// Limits of a selector.
const (
	maxSelector = 4096 // bytes
	maxLabel    = 63   // bytes, as in Kubernetes
	maxPrefix   = 253  // bytes of the domain in a key, as in Kubernetes
)

// labelOf returns the label of a model: the name with an underscore for every character that a label of Kubernetes must
// not have, cut to 63 characters. meta-llama/Llama-3 has the label meta-llama_Llama-3.
func labelOf(model string) string {
	label := strings.Map(func(r rune) rune {
		if r < utf8.RuneSelf && (alphanumeric(byte(r)) || strings.ContainsRune("-_.", r)) {
			return r
		}
		return '_'
	}, model)
	return strings.Trim(label[:min(len(label), maxLabel)], "-_.")
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// requirement is a condition of a selector on the value of a label.
type requirement struct {
	key    string
	values []string // nil: any value
	not    bool     // the label is absent or has none of the values
}

// selector is the conjunction of requirements. The empty selector matches all labels.
type selector []requirement

func (s selector) matches(labels map[string]string) bool {
	for _, r := range s {
		is, has := labels[r.key]
		if in := has && (r.values == nil || slices.Contains(r.values, is)); in == r.not {
			return false
		}
	}
	return true
}

// parseSelector reads a label selector in the form of a URL: requirements with commas between them, each KEY, !KEY,
// KEY=VALUE, KEY==VALUE, KEY!=VALUE, KEY in (VALUE,...) or KEY notin (VALUE,...). Kubernetes' KEY>NUMBER and KEY<NUMBER
// are errors, because no label is a number.
func parseSelector(text string) (selector, error) {
	if len(text) > maxSelector {
		return nil, fmt.Errorf("the label selector has more than %d bytes", maxSelector)
	}
	tokens := tokenize(text)
	var all selector
	for len(tokens) > 0 {
		r, rest, err := parseRequirement(tokens)
		if err != nil {
			return nil, fmt.Errorf("the label selector %.100q: %w", text, err)
		}
		all, tokens = append(all, r), rest
		if len(tokens) == 0 {
			break
		}
		if tokens[0] != "," || len(tokens) == 1 {
			return nil, fmt.Errorf("the label selector %.100q: %q is not a comma before a requirement", text, tokens[0])
		}
		tokens = tokens[1:]
	}
	return all, nil
}

// tokenize splits a selector into words, commas, brackets and operators.
func tokenize(text string) (tokens []string) {
	const special, blanks = "=!(),<>", " \t\r\n"
	for {
		text = strings.TrimLeft(text, blanks)
		switch n := strings.IndexAny(text, special+blanks); {
		case text == "":
			return tokens
		case n < 0:
			return append(tokens, text)
		case n == 0 && (strings.HasPrefix(text, "==") || strings.HasPrefix(text, "!=")):
			tokens, text = append(tokens, text[:2]), text[2:]
		case n == 0:
			tokens, text = append(tokens, text[:1]), text[1:]
		default:
			tokens, text = append(tokens, text[:n]), text[n:]
		}
	}
}

// parseRequirement reads the first requirement of a list that is not empty.
func parseRequirement(tokens []string) (r requirement, rest []string, err error) {
	next := func() (token string) {
		if len(tokens) > 0 {
			token, tokens = tokens[0], tokens[1:]
		}
		return token
	}
	if r.key = next(); r.key == "!" {
		r.key, r.not = next(), true
		return r, tokens, checkKey(r.key)
	}
	if err := checkKey(r.key); err != nil || len(tokens) == 0 || tokens[0] == "," {
		return r, tokens, err
	}
	switch operator := next(); operator {
	case "=", "==", "!=":
		value := ""
		if len(tokens) > 0 && tokens[0] != "," {
			value = next()
		}
		r.not, r.values = operator == "!=", []string{value}
	case "in", "notin":
		r.not = operator == "notin"
		if r.values, tokens, err = parseValues(tokens); err != nil {
			return r, nil, err
		}
	default:
		return r, nil, fmt.Errorf("%.63q is none of =, ==, !=, in, notin", operator)
	}
	for _, value := range r.values {
		if value != "" && !isName.MatchString(value) || len(value) > maxLabel {
			return r, nil, fmt.Errorf("%.63q cannot be the value of a label", value)
		}
	}
	return r, tokens, nil
}

// parseValues reads (VALUE,...). A value may be empty.
func parseValues(tokens []string) (values, rest []string, err error) {
	end := slices.Index(tokens, ")")
	if end < 1 || tokens[0] != "(" {
		return nil, nil, fmt.Errorf("in and notin need values in brackets")
	}
	value, given := "", false
	for _, token := range tokens[1:end] {
		switch {
		case token == ",":
			values, value, given = append(values, value), "", false
		case given:
			return nil, nil, fmt.Errorf("%.63q is not a comma between values", token)
		default:
			value, given = token, true
		}
	}
	return append(values, value), tokens[end+1:], nil
}

var (
	isName   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
	isDomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// checkKey checks the key of a label: NAME or DOMAIN/NAME.
func checkKey(key string) error {
	name := key
	if domain, after, has := strings.Cut(key, "/"); has {
		if name = after; !isDomain.MatchString(domain) || len(domain) > maxPrefix {
			return fmt.Errorf("%.63q is not the key of a label", key)
		}
	}
	if !isName.MatchString(name) || len(name) > maxLabel {
		return fmt.Errorf("%.63q is not the key of a label", key)
	}
	return nil
}
