package tenants

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// maxFile bounds the bytes of a file with quotas.
const maxFile = 1 << 20

// ReadQuotas reads a YAML file with a quota for each tenant. An empty path means no quotas.
func ReadQuotas(path string) (map[string]*Quota, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseQuotas(text)
}

// fileQuota is a quota in the file.
type fileQuota struct {
	TokensPerMinute uint64 `json:"tokens_per_minute"`
	Count           Count  `json:"count"`
	Over            Action `json:"over"`
	Class           string `json:"class"`
}

func parseQuotas(text []byte) (map[string]*Quota, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("the file has more than %d bytes", maxFile)
	}
	var given map[string]any
	if err := yaml.Unmarshal(text, &given); err != nil {
		return nil, fmt.Errorf("the file is not YAML with a quota for each tenant: %w", err)
	}
	quotas, wrong := map[string]*Quota{}, []error{}
	for tenant, value := range given {
		f := fileQuota{Count: CountRequested, Over: Reject}
		text, err := json.Marshal(value)
		if err == nil {
			err = strictjson.UnmarshalKnown(text, &f)
		}
		q := &Quota{f.TokensPerMinute, f.Count, f.Over, f.Class}
		if err == nil {
			err = CheckQuota(q)
		}
		if err == nil && tenant != Everyone && tenant != Unnamed && !strings.Contains(tenant, ":") {
			err = fmt.Errorf("a tenant is SOURCE:VALUE, as in indexer tenants, %q for each other tenant, or %q for requests "+
				"without a tenant", Everyone, Unnamed)
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%.100q: %w", tenant, err))
		}
		quotas[tenant] = q
	}
	return quotas, errors.Join(wrong...)
}
