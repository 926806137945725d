package hicache

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// Passed are the names of fields of a configuration that are not known here and are passed over, such as those of a
// newer engine. It is empty if there are none.
type Passed []string

// String names the fields, for a warning.
func (p Passed) String() string { return strings.Join(p, ", ") }

// PassedRemedy is what to do about fields that are passed over.
const PassedRemedy = "nothing if a newer engine publishes these fields; otherwise correct their names"

// DecodeConfig decodes the configuration of one worker, in JSON. Its errors name fields as they are written, and say
// what they should be. [Config.Check] says whether the values make sense.
func DecodeConfig(data []byte) (c Config, passed Passed, err error) {
	passed, err = strictjson.UnmarshalNoting(data, &c)
	return c, passed, decodeError(err)
}

// ParseConfig is DecodeConfig, and checks the configuration.
func ParseConfig(data []byte) (c Config, passed Passed, err error) {
	if c, passed, err = DecodeConfig(data); err != nil {
		return Config{}, nil, err
	}
	return c, passed, c.Check()
}

// ParseModels reads {"MODEL": configuration, ...}, and says all that is wrong with the configurations. passed has an
// entry for each model of which fields are passed over.
func ParseModels(data []byte) (models map[string]Config, passed map[string]Passed, err error) {
	var texts map[string]json.RawMessage
	if err := decodeError(strictjson.Unmarshal(data, &texts)); err != nil {
		return nil, nil, err
	}
	models, passed = make(map[string]Config, len(texts)), map[string]Passed{}
	var wrong complaints
	for model, text := range texts {
		c, over, err := ParseConfig(text)
		if models[model] = c; len(over) > 0 {
			passed[model] = over
		}
		wrong.add(err != nil, "model %q: %w", model, err)
	}
	return models, passed, errors.Join(wrong...)
}

// decodeError is an error of strictjson in words.
func decodeError(err error) error {
	if err == nil {
		return nil
	}
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.Is(err, strictjson.ErrTwice):
		return err
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("it is %s, not an object", article(wrong.Value))
	case errors.As(err, &wrong):
		return fmt.Errorf("%s is %s, not %s", wrong.Field, article(wrong.Value), wanted(wrong.Type))
	}
	return fmt.Errorf("it is no JSON: %w", err)
}

// article is a kind of JSON value as it is named in messages.
func article(kind string) string {
	switch name, _, _ := strings.Cut(kind, " "); name { // a number that does not fit is "number 1.5"
	case "string":
		return "text"
	case "bool":
		return "true or false"
	case "array":
		return "a list"
	case "object":
		return "an object"
	}
	return strings.Replace(kind, "number", "the number", 1)
}

// wanted is what a field wants, in words.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "a list"
	case reflect.Struct:
		return "an object"
	}
	return "a whole number in its range"
}
