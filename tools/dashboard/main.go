// Command dashboard writes deploy/grafana/kvatlas.json, a dashboard for Grafana 10 and later. panels.go has the
// queries.
//
//	go generate ./tools/dashboard
package main

//go:generate go run . ../../deploy/grafana/kvatlas.json

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: dashboard FILE")
		os.Exit(2)
	}
	if err := os.WriteFile(os.Args[1], dashboard(), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

type object = map[string]any

// columns is the width of Grafana's grid.
const columns = 24

// source is the data source that the user selects in the dashboard.
var source = object{"type": "prometheus", "uid": "${datasource}"}

// dashboard is the file.
func dashboard() []byte {
	panels, y := []object{}, 0
	add := func(p object, w, h, x int) {
		p["id"] = len(panels) + 1
		p["gridPos"] = object{"w": w, "h": h, "x": x, "y": y}
		panels = append(panels, p)
	}
	for _, r := range rows {
		add(object{"type": "row", "title": r.title, "collapsed": false, "panels": []object{}}, columns, 1, 0)
		y++
		for i, p := range r.panels {
			x, end := i*columns/len(r.panels), (i+1)*columns/len(r.panels)
			add(p.object(), end-x, r.height, x)
		}
		y += r.height
	}
	models := "label_values(kvatlas_model_ranks, model)"
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(object{
		"title": "kvatlas", "uid": "kvatlas", "tags": []string{"kvatlas"}, "schemaVersion": 39, "editable": true,
		"refresh": "30s", "time": object{"from": "now-1h", "to": "now"}, "graphTooltip": 1,
		"description": "Prefix-cache index of a fleet: hit rates, requests, cluster, log, engines.",
		"templating": object{"list": []object{
			{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
			{"name": "model", "type": "query", "label": "Model", "datasource": source, "query": object{"query": models,
				"refId": "models"}, "definition": models, "refresh": 2, "multi": true, "includeAll": true, "allValue": ".*",
				"current": object{"text": "All", "value": "$__all"}},
		}},
		"panels": panels,
	})
	if err != nil {
		panic(err) // all values can be encoded
	}
	return text.Bytes()
}

func (p panel) object() object {
	kind, custom, options := "timeseries", object{"fillOpacity": 10, "showPoints": "never"}, object{
		"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}}
	if p.stat {
		kind, custom = "stat", object{}
		options = object{"reduceOptions": object{"calcs": []string{"lastNotNull"}}, "colorMode": "value"}
	}
	defaults := object{"unit": p.unit, "custom": custom}
	if p.unit == percent {
		defaults["min"], defaults["max"] = 0, 1
	}
	targets := []object{}
	for i, q := range p.queries {
		targets = append(targets, object{"refId": string(rune('A' + i)), "datasource": source, "expr": q.expr,
			"legendFormat": q.legend, "range": !p.stat, "instant": p.stat})
	}
	return object{"type": kind, "title": p.title, "description": p.help, "datasource": source, "targets": targets,
		"fieldConfig": object{"defaults": defaults, "overrides": []object{}}, "options": options}
}
