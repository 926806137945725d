//go:build realvllm

package vllm

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
)

// weights are tensors for a file in the form of safetensors.
type weights struct {
	random *rand.Rand
	header map[string]tensor
	data   []byte
}

// tensor is the place of a tensor in a file.
type tensor struct {
	Type    string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

func newWeights(seed uint64) *weights {
	return &weights{random: rand.New(rand.NewPCG(seed, 2)), header: map[string]tensor{}}
}

// add adds a tensor of random numbers with a standard deviation.
func (w *weights) add(name string, deviation float64, shape ...int) {
	w.fill(name, shape, func() float64 { return w.random.NormFloat64() * deviation })
}

// addOnes adds a tensor of ones.
func (w *weights) addOnes(name string, shape ...int) {
	w.fill(name, shape, func() float64 { return 1 })
}

func (w *weights) fill(name string, shape []int, next func() float64) {
	from, n := len(w.data), 1
	for _, size := range shape {
		n *= size
	}
	for range n {
		w.data = binary.LittleEndian.AppendUint32(w.data, math.Float32bits(float32(next())))
	}
	w.header[name] = tensor{"F32", shape, [2]int{from, len(w.data)}}
}

// write writes the file.
func (w *weights) write(t *testing.T, path string) {
	t.Helper()
	text, err := json.Marshal(w.header)
	if err != nil {
		t.Fatal(err)
	}
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	if err := os.WriteFile(path, append(file, w.data...), 0o644); err != nil {
		t.Fatal(err)
	}
}

// writeLlama writes the weights of a model with the architecture of Llama. The numbers are large enough that an answer
// depends on each token of the prompt.
func writeLlama(t *testing.T, path string, vocabulary int) {
	t.Helper()
	w := newWeights(1)
	w.add("model.embed_tokens.weight", 1, vocabulary, hidden)
	w.add("lm_head.weight", 0.3, vocabulary, hidden)
	w.addOnes("model.norm.weight", hidden)
	for layer := range layers {
		name := fmt.Sprintf("model.layers.%d.", layer)
		w.addOnes(name+"input_layernorm.weight", hidden)
		w.addOnes(name+"post_attention_layernorm.weight", hidden)
		w.add(name+"self_attn.q_proj.weight", 0.2, heads*headSize, hidden)
		w.add(name+"self_attn.k_proj.weight", 0.2, keyHeads*headSize, hidden)
		w.add(name+"self_attn.v_proj.weight", 0.2, keyHeads*headSize, hidden)
		w.add(name+"self_attn.o_proj.weight", 0.2, hidden, heads*headSize)
		w.add(name+"mlp.gate_proj.weight", 0.1, intermediate, hidden)
		w.add(name+"mlp.up_proj.weight", 0.1, intermediate, hidden)
		w.add(name+"mlp.down_proj.weight", 0.1, hidden, intermediate)
	}
	w.write(t, path)
}
