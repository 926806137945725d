package hicache

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// Passed has the names of unknown fields of a configuration, such as fields of a newer engine. Decoding ignores the
// fields.
type Passed []string

// String joins the names for a warning.
func (p Passed) String() string { return strings.Join(p, ", ") }

// Remedy returns the remedy for ignored fields, for the operator.
func (p Passed) Remedy() string {
	return "nothing if a newer engine publishes these fields; otherwise correct their names"
}

// DecodeConfig decodes the JSON configuration of a worker. An error names the field and the expected type.
// [Config.Check] validates the values.
func DecodeConfig(data []byte) (c Config, passed Passed, err error) {
	passed, err = strictjson.UnmarshalNoting(data, &c)
	return c, passed, decodeError(err)
}

// ParseConfig is DecodeConfig with [Config.Check].
func ParseConfig(data []byte) (c Config, passed Passed, err error) {
	if c, passed, err = DecodeConfig(data); err != nil {
		return Config{}, nil, err
	}
	return c, passed, c.Check()
}

// ParseModels parses {"MODEL": configuration, ...} and returns all faults of the configurations. passed has an entry
// for each model with ignored fields.
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

// decodeError rewrites an error of strictjson for users.
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
	return fmt.Errorf("invalid JSON: %w", err)
}

// article returns the name of a kind of JSON value for messages.
func article(kind string) string {
	switch name, _, _ := strings.Cut(kind, " "); name { // the kind of an unfit number is "number 1.5"
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

// wanted returns the name of a field's type for messages.
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
