// Shapes that the page's scripts share, for `make lint-js` alone: nothing here is shipped or served. First what the
// server sends, endpoint by endpoint (`Responses`), then what the page makes of it.

// Tokens, tensors and the model

/** A token as the page shows it. Labels of classifiers have the same shape. */
interface Token {
  id: number;
  text: string; // with visible whitespace
  kind?: "special" | "bytes";
  masked?: boolean;
}

/** A tensor as it is sent: base64 data of one of two types. */
type PackedTensor = { shape: number[]; f32: string } | { shape: number[]; u8: string } | Tensor;

/** A tensor in row-major order. */
interface Tensor {
  shape: number[];
  data: Float32Array; // or Uint8Array, which is read alike
}

/** The tokens of a prompt: of a text; or of source and target, which are there for encoder-decoders, and no text. */
interface Tokens {
  text: Token[];
  source: Token[];
  target: Token[];
  start?: number; // how many tokens of the target are given by the model
}

type Side = "text" | "source" | "target";

/** One kind of attention, of which an encoder-decoder has three. */
interface Attention {
  site: string;
  title: string;
  layers: number;
  queries: Side;
  keys: Side;
  causal: boolean;
}

interface Model {
  name: string;
  kind: "decoder" | "encoder" | "seq2seq";
  n_layers: number;
  n_encoder_layers: number;
  n_heads: number;
  n_kv_heads: number;
  d_model: number;
  d_head: number;
  d_ff: number;
  vocab_size: number;
  max_len: number;
  position: string;
  norm: string;
  norm_placement: "pre" | "post" | "sandwich" | "output" | "parallel";
  feedforward: string;
  head: string; // "next_token", "masked_token", "sequence_classification", "token_classification", or one without logits
  parameters: number;
  attentions: Attention[];
  predicts_tokens: boolean;
  generates: boolean;
  has_mask_token: boolean;
  tokenizer: string | null;
  has_merges: boolean;
  checkpoints: string[];
  planned_steps: number | null;
  folders: Record<string, string>;
  in_memory: boolean;
  run: boolean;
  views: string[];
  example: string;
}

// Forward passes and the state of the page

interface PagePrompt {
  text: string;
  target?: string;
  appended?: number[];
  masked?: number[];
}

type Edit =
  | { kind: "scale"; site: string; factor?: number } // 0 by default
  | { kind: "mean"; site: string }
  | { kind: "patch"; site: string };

interface ForwardPass {
  prompt: PagePrompt;
  checkpoint?: string;
  edits?: Edit[];
  patch_from?: PagePrompt;
}

/** The state in the URL fragment: `DEFAULTS` of url_state.py, then the keys of single views. */
interface PageState {
  view: string;
  text: string;
  target: string;
  appended: number[];
  masked: number[];
  token: number;
  key: number;
  layer: number;
  head: number;
  attention: string;
  edits: Edit[];
  patch_from: string;
  checkpoint: string;
  compare_with: string;
  temperature: number;
  top_k: number;
  top_p: number;
  seed: number;
  answer?: string; // an answer of the server, by its id
  attention_key?: number;
  attention_lines?: string;
  attention_query?: number;
  attention_scale?: string;
  circuit_edge?: string; // its writer and its reader
  circuit_size?: number; // that many of the largest edges, and not the circuit that was found
  interventions_edit?: string;
  interventions_site?: string;
  interventions_stack?: string;
  notes_all?: number;
  notes_card?: string;
  notes_cards?: string;
  notes_large?: number;
  notes_value?: number;
  overview_zoom?: string;
  residual_color?: string;
  residual_embed?: number;
  residual_incorrect_token?: number;
  residual_token?: number;
  run_gpu?: string;
  run_left?: number;
  run_right?: number;
  run_scale?: string;
  run_score?: string;
  run_smoothing?: number;
  run_step?: number;
  seq2seq_beams?: number;
  seq2seq_length_penalty?: number;
  seq2seq_pruned?: number;
  seq2seq_moment?: string;
  seq2seq_scope?: string;
  tokens_incorrect_token?: number;
  tokens_output?: number; // the token or label whose logit saliency explains
  tokens_saliency?: SaliencyMethod;
  walkthrough_all?: number;
  walkthrough_card?: string;
  walkthrough_side?: string;
}

/** The names of what changed since a view was drawn: keys of the state, and "tokens". */
type Changed = Set<string>;

// Responses

interface Candidate extends Token {
  probability: number;
  sampling_probability: number;
  logit: number;
}

interface NextToken {
  position: number;
  candidates: Candidate[];
  actual_next: number | null;
  entropy: number;
  sampling_entropy: number;
  n_candidates: number;
}

type SaliencyMethod = "integrated_gradients" | "gradient_x_input" | "attention_rollout";

/** How much each token moved a logit; `baseline` and `gap` are of integrated gradients alone. */
interface TokenSaliency {
  output: Token;
  incorrect_token: Token | null;
  value: number;
  baseline: number | null;
  gap: number | null;
  steps: number;
  scores: PackedTensor;
  source_scores: PackedTensor | null;
}

interface MergeTree {
  text: string;
  rank: number | null;
  parts: MergeTree[];
}

type Pair = [string, string];

interface WordMerges {
  word: string;
  steps: { rank: number; merge: Pair; tokens: string[] }[]; // the first has the bytes alone, and no others
  trees: MergeTree[];
}

interface BpeStep {
  merge: Pair;
  token: string;
  count: number;
  runners_up: { merge: Pair; count: number }[];
  tokens: number;
}

interface QueryKeyPair {
  q: PackedTensor;
  k: PackedTensor;
  products: PackedTensor;
  sum: number;
  scale: number;
  softcap: number | null;
  bias: number | null; // null: masked
  score: number;
  largest: number;
  total: number;
  weight: number;
  weights: PackedTensor; // of all keys, below 0 where masked
  seen: number;
  top: { key: number; weight: number; score: number }[];
  v: PackedTensor;
  weighted_value: PackedTensor;
  z: PackedTensor;
  kv_head: number;
  group: number;
}

type HeadScore = "current_token" | "previous" | "first" | "duplicate" | "induction" | "broad";

/** The scores of one head, and the one that it is labelled by. */
type LabelledScores = Partial<Record<HeadScore | "entropy", number>> & { label: HeadScore | null };

interface HeadScores {
  heads: LabelledScores[][];
  uniform: Partial<Record<HeadScore | "entropy", number>>[];
  scored: number;
  of: number;
}

interface LayerMaps {
  maps: PackedTensor;
  pool_size: [number, number];
  stride: number;
}

type OverviewPart = "attention" | "cross" | "feedforward";

/** One stack of the overview, of which positions from `start` to `stop` are drawn. */
interface OverviewStack {
  name: string;
  start: number;
  stop: number;
  of: number;
  stream: PackedTensor; // norms [1 + layer, position]
  added: Record<string, PackedTensor>; // norms relative to the stream, by part: [layer, position]
  heads: Record<string, { norm: PackedTensor; source: PackedTensor; weight: PackedTensor }>; // [layer, head, position]
}

interface LensResponse {
  layers: number[];
  outputs: number;
  tokens: number[][][]; // [layer][position][rank]
  targets: (number | null)[];
  token_info: Record<string, Token>;
  probability: PackedTensor;
  entropy: PackedTensor;
  rank: PackedTensor;
  loss: PackedTensor;
}

interface NormsResponse {
  layers: number[];
  norms: PackedTensor;
}

interface LogitAttribution {
  token: Token;
  incorrect_token: Token | null;
  logit: number;
  embedding: number;
  bias: number;
  heads: PackedTensor;
  cross_heads: PackedTensor | null;
  feedforward: PackedTensor;
}

interface LossResponse {
  measure: "loss" | "relative_change";
  values: PackedTensor;
  counted: "masked" | "all";
  count: number;
  mean: number | null;
}

/** What a clean and a corrupted text predict at each token, or why there is no circuit of them. */
interface TextPair {
  why_not: string | null;
  clean: Token[];
  corrupted: Token[];
}

/** An edge of the model by its writer and its reader, and its estimated effect. */
interface CircuitEdge {
  writer: string;
  reader: string;
  effect: number;
}

/** So many of the largest edges: which of them lie on a path to the logits, by rank, and how faithful they are. */
interface CircuitSize {
  size: number;
  kept: number[];
  faithfulness: number;
}

interface EdgeEffects {
  edges: CircuitEdge[]; // the largest, largest first
  n_edges: number;
  sizes: CircuitSize[];
  before: number;
  after: number;
}

/** The panel of the chosen edge. */
interface ChosenEdge {
  node: HTMLElement;
  show: (edge: CircuitEdge | undefined, edges: CircuitEdge[], body: RequestBody) => Promise<void>;
  colour: () => void;
}

interface FoundCircuit {
  edges: CircuitEdge[];
  faithfulness: number;
  completeness: number;
  random_faithfulness: number;
  largest: CircuitSize;
}

interface BeamNode extends Token {
  parent: number | null;
  logprob: number;
  total: number;
  score: number;
  step: number;
  outcome: "kept" | "ended" | "pruned";
}

interface Hypothesis {
  ids: number[];
  text: string;
  tokens: Token[];
  score: number;
  finish_reason: string;
  path: number[];
}

interface BeamTree {
  nodes: BeamNode[];
  hypotheses: Hypothesis[];
}

interface MetricCurve {
  step: number[];
  mean: number[];
  low?: number[];
  high?: number[];
}

interface RunMetrics {
  version: string;
  since: number;
  steps_per_point: number;
  step: number;
  curves: Record<string, MetricCurve>;
  best: { step: number; value: number } | null;
  status: "running" | "finished" | "stopped";
  steps: number | null;
  checkpoints: { name: string; step: number }[];
  checkpoint_log_version: string;
}

interface RunSample {
  prompt: string;
  text: string;
  reference?: string;
}

interface SampleLog {
  steps: number[];
  samples: RunSample[][];
  left_out: number;
}

interface ProbeLog {
  steps: number[];
  heads: Record<string, ((number | null)[][] | null)[]>; // [checkpoint][layer][head]
  layers: Record<string, ((number | null)[] | null)[]>; // [checkpoint][layer]
  left_out: number;
}

interface CheckpointComparison {
  tokens: Token[];
  losses: [number, number] | [null, null];
  residual_distance: PackedTensor;
  kl_divergence: PackedTensor;
  pattern_distance: PackedTensor;
}

interface TrainingPlan {
  layout: { kind: string; why: string };
  memory: { peak: number; moment: string; parts: Record<string, number> };
  usable_memory: number;
  gpu: { name: string; memory: number };
  gpus: number;
  rows: number;
  largest_rows: number;
  grad_accum: number;
  n_parameters: number;
  micro_batches: { rows: number; memory: number; tokens_per_second: number }[];
  tokens_per_second: number;
  fits: boolean;
  days: number | null;
  cost: number | null;
}

// Notes: a figure is a list of pieces

interface MatrixPiece {
  kind: "matrix";
  title: string;
  values: PackedTensor;
  rows: string[];
  columns: string[];
  signed: boolean;
  row: number | null;
  along: [string, string];
}

interface BarsPiece {
  kind: "bars";
  title: string;
  rows: [string, number][];
  most: number;
}

interface LinesPiece {
  kind: "lines";
  title: string;
  along: string;
  series: { name: string; x: number[]; y: (number | null)[] }[];
  log: boolean;
}

interface TablePiece {
  kind: "table";
  title: string;
  head: string[];
  rows: (string | number | null)[][];
}

interface FactsPiece {
  kind: "facts";
  facts: [string, string | number | null][];
}

interface TokensPiece {
  kind: "tokens";
  title: string;
  tokens: [string, boolean][];
}

interface ShapesPiece {
  kind: "shapes";
  parts: [string, number[]][];
}

interface DialsPiece {
  kind: "dials";
  dials: { name: string; angle: number; before: [number, number]; after: [number, number] }[];
}

interface TextPiece {
  kind: "text";
  text: string;
}

type Piece =
  | MatrixPiece
  | BarsPiece
  | LinesPiece
  | TablePiece
  | FactsPiece
  | TokensPiece
  | ShapesPiece
  | DialsPiece
  | TextPiece;

interface FigureControl {
  label: string;
  start: number;
  low: number;
  high: number;
  step: number;
  labels: string[]; // of its positions, where they are not the values themselves
}

interface Statement {
  number: string;
  title: string;
  why: string;
  says: string;
  slip: string;
  shown_by: string;
  measured: string;
  try_it: string;
  read: string[];
  code: { path: string; line: number; name: string; text: string };
  measured_pieces: Piece[];
  verdicts: { on: string; figures: string[] } | null;
  figure: { reads: string[]; control: FigureControl | null } | null;
}

interface NotesPart {
  name: string;
  title: string;
  measured_on: string;
  statements: Statement[];
  questions: { ask: string; answer: string; card: string }[];
}

interface NotesExample {
  title: string;
  text: string;
  ids: number[];
  card: string;
}

// Walkthrough: a card for each step, by its kind

interface CardBase {
  node: string;
  site: string;
  changed: boolean;
  what?: string;
  of?: number; // the token whose key and value are shown
}

interface LinearCard {
  x: PackedTensor;
  y: PackedTensor;
  weight: PackedTensor;
  shape: [number, number];
  bias?: PackedTensor;
  kv?: number;
}

/** Scores of all keys, before and after a step. */
interface ScoresCard {
  x: PackedTensor;
  y: PackedTensor;
  first: number; // of the keys that are shown
  added?: PackedTensor;
}

interface VectorsCard {
  x: PackedTensor;
  y: PackedTensor;
}

/** What a step of each kind has. */
interface CardFields {
  embed: { id: number; first: number; rows: PackedTensor; shape: [number, number]; y: PackedTensor };
  scale: VectorsCard & { by: number };
  segment: VectorsCard & { added: PackedTensor };
  position: VectorsCard & { added: PackedTensor; how: string; layout?: string; row?: number };
  norm: VectorsCard & {
    how: "layer" | "rms";
    mean: number;
    variance: number;
    square: number;
    eps: number;
    gain: PackedTensor;
    bias?: PackedTensor;
    heads?: number; // measured together, where the norm of a query or key is over all of them
  };
  arrive: { y: PackedTensor };
  add: VectorsCard & { added: PackedTensor };
  leave: { y: PackedTensor };
  memory: { y: PackedTensor };
  query: LinearCard;
  key: LinearCard;
  value: LinearCard;
  rotate: VectorsCard & {
    x_key: PackedTensor;
    y_key: PackedTensor;
    angles: PackedTensor;
    layout: string;
    width: number; // coordinates of a head that are rotated
    place: number;
    theta: number;
    scaling: string;
  };
  scores: { q: PackedTensor; rows: PackedTensor; y: PackedTensor; first: number; by: number };
  softcap: ScoresCard & { cap: number };
  bias: ScoresCard & { how: string; slope: number };
  mask: ScoresCard & { seen: PackedTensor; window: number | null; n_seen: number; n_keys: number };
  softmax: ScoresCard & { largest: number };
  gather: { weights: PackedTensor; rows: PackedTensor; y: PackedTensor; first: number };
  join: { heads: PackedTensor; y: PackedTensor };
  out: LinearCard;
  gate: LinearCard;
  up: LinearCard;
  activate: VectorsCard & { how: string; gate?: PackedTensor; strongest: number[] };
  down: LinearCard;
  transform: LinearCard & { how: string; bent: PackedTensor };
  logits: {
    x: PackedTensor;
    by: number;
    cap: number | null;
    bias?: PackedTensor;
    rows: PackedTensor;
    shape: [number, number];
    top: TopToken[];
    tied: boolean;
  };
  probabilities: { top: TopToken[]; count: number; total: number };
  labels: { x: PackedTensor; pooled: boolean; top: TopToken[]; count: number };
  vectors: { y: PackedTensor; pooled: boolean };
}

interface TopToken extends Token {
  logit: number;
  probability: number;
}

type CardKind = keyof CardFields;
type CardOf<K extends CardKind> = CardBase & { kind: K } & CardFields[K];

/** A step of a registered layer, which brings its own words; its vectors are fields of their own names. */
type GeneralCard = CardBase & { kind: string; title: string; formula?: string; why?: string };
type StepCard = CardOf<CardKind> | GeneralCard;

interface WalkthroughResponse {
  position: number;
  layer: number;
  head: number;
  side: string;
  n_layers: number;
  token: Token;
  cards: StepCard[];
}

/** What the view knows of model, token and selection when a card is drawn. */
interface CardContext {
  model: Model;
  found: WalkthroughResponse;
  side: string;
  say: (text: string) => void;
  keys: (card: CardBase) => Token[];
  here: (card: CardBase) => number;
}

/** A step in words, a formula and a figure. */
interface DescribedCard {
  name: string;
  formula: string;
  legend: string[][]; // symbols and what they stand for
  why: string;
  figure: () => Child;
}

/** How cards of some kinds are described. */
type Describe<K extends CardKind> = { [Kind in K]: (card: CardOf<Kind>, c: CardContext) => DescribedCard };

interface GlossaryEntry {
  term: string;
  text: string;
  also: string[];
}

/** The responses by endpoint. */
interface Responses {
  model: Model;
  opening_selection: { layer?: number; head?: number; key?: number };
  checkpoints: { checkpoints: string[] };
  glossary: { entries: GlossaryEntry[] };
  tokenize: Tokens;
  next: NextToken;
  generate: { tokens: Token[]; logprobs: (number | null)[]; text: string; finish_reason: string };
  save: { html: string };
  token_saliency: TokenSaliency;
  word_merges: WordMerges;
  train_bpe: { words: string[][]; steps: BpeStep[]; cut: boolean };
  query_key: QueryKeyPair;
  tile: { cells: PackedTensor };
  scores: HeadScores;
  maps: LayerMaps;
  overview: { stacks: OverviewStack[] };
  layer_heads: { weights: PackedTensor; moved: PackedTensor };
  lens: LensResponse;
  norms: NormsResponse;
  cosine_similarity: { cosine: PackedTensor; nearest: (Token & { position: number; cosine: number })[] };
  logit_attribution: LogitAttribution;
  loss: LossResponse;
  ablate_each: { before: number | null; loss_increase: (number | null)[] };
  compare_predictions: {
    candidates: (Token & { before: number; after: number })[];
    divergence: number | null;
  };
  patch_each: { effect: (number | null)[]; here: Token; there: Token; before: number; after: number };
  estimate_patches: { effect: PackedTensor; here: Token; there: Token };
  text_pair: TextPair;
  edge_effects: EdgeEffects;
  find_circuit: { done: number; total: number; found: FoundCircuit | null };
  patch_edge: { effect: number | null; positions: PackedTensor; is_source: boolean };
  cross_attention: { weights: PackedTensor; source: number[]; target: number[] };
  beams: BeamTree;
  walkthrough: WalkthroughResponse;
  metrics: RunMetrics;
  run_settings: { settings: { name: string; value: string }[]; batch_tokens: number };
  plan: { plan: TrainingPlan; gpus: string[] };
  probes: ProbeLog;
  samples: SampleLog;
  compare_checkpoints: CheckpointComparison;
  notes: { parts: NotesPart[]; examples: NotesExample[] };
  note_figure: { pieces: Piece[]; worked: Piece[]; limit: number | null };
}

type Endpoint = keyof Responses;

/** The parameters of a request. */
interface RequestBody {
  forward_pass?: ForwardPass;
  [name: string]: unknown;
}

interface RequestOptions {
  fresh?: boolean; // do not take the response from the cache, nor keep it
  topic?: string; // what the request is about: it is aborted when the page turns to other topics
}

// The model inside a live page, which its worker runs

type Dtype = "float32" | "float64" | "int64" | "bool";

/** An array of the interpreter, in row-major order. */
interface NdArray {
  shape: number[];
  dtype: Dtype;
  data: Float32Array; // or Float64Array, Int32Array or Uint8Array, which are read alike
}

/** One of ATen's, with its arguments by name, and the dtype of what it makes. */
// biome-ignore lint/suspicious/noExplicitAny: each operation has arguments of its own
type Operation = (args: any, dtype: Dtype) => any;

/** A constant of a graph: base64 data. */
interface GraphConstant {
  shape: number[];
  dtype: Dtype;
  data: string;
}

/** A graph of operations; "$7" refers to value 7. */
interface GraphJson {
  inputs: Record<string, string | string[]>;
  weights: Record<string, string>; // references by the name of the parameter
  constants: Record<string, GraphConstant>; // by reference
  nodes: { op: string; args: Record<string, unknown>; out: string; dtype?: Dtype }[];
  outputs: Record<string, string | string[]>;
}

interface TokenizerJson {
  pattern: "gpt2" | "gpt4";
  normalizer: string | null;
  ignore_merges: boolean;
  bytes: number[]; // the id of each byte
  merges: [number, number, number][]; // the ids of both halves and of the whole
  before: number[]; // ids around every text
  after: number[];
  tokens: (Token & { bytes: string })[]; // bytes as the characters of those numbers
}

interface RotateSettings {
  layout: string;
  width: number;
  theta: number;
  scaling: string;
  by: number;
  frequencies: number[];
}

/** What Step through says of the layers: page/live/steps.py. */
interface StepSettings {
  norm: "rms" | "layer";
  eps: number;
  placement: Model["norm_placement"];
  embed_scale: number;
  embed_norm: boolean;
  final_norm: boolean;
  qk_norm_over: "head" | "projection";
  position: { how: string; layout?: string; offset: number };
  rotate: RotateSettings[] | null; // by layer
  slopes: number[] | null;
  windows: number[];
  feedforward: string;
  head_scale: number;
  logit_softcap: number | null;
  pooled: boolean;
}

/** The model of a live page besides its graphs: page/live/file.py. */
interface LiveAbout {
  kind: Model["kind"];
  n_layers: number;
  n_encoder_layers: number;
  n_heads: number;
  n_kv_heads: number;
  d_head: number;
  head: string;
  predicts_tokens: boolean;
  n_outputs: number;
  labels: string[] | null;
  start_id: number | null;
  end_ids: number[];
  suppressed: number[];
  opening: number[]; // ids that every target starts with
  mask_id: number | null;
  limit: number; // tokens of a text
  scale: number;
  softcap: number | null;
  biased: boolean;
  walkthrough: StepSettings | null;
}

interface LiveFile {
  program: {
    graphs: Record<string, GraphJson>;
    weights: Record<string, number[]>; // shapes, in the order of the values
    axes: Record<string, string[]>; // of each site
  };
  about: LiveAbout;
  tokenizer: TokenizerJson;
}

type LiveModel = import("glasshouse/live/model.js").LiveModel;
/** Answers a request as the server's endpoint of that name does, with tensors as arrays. */
// biome-ignore lint/suspicious/noExplicitAny: each endpoint has parameters of its own, as in page/views/
type LiveEndpoint<K extends Endpoint> = (model: LiveModel, body: any) => Responses[K];

/** A site, and an index of each axis: a number, a start and an end, or null for all. */
interface SiteSelection {
  site: string;
  axes: string[];
  index: (number | [number | null, number | null] | null)[];
}

interface SamplingSettings {
  temperature?: number;
  top_k?: number | null;
  top_p?: number | null;
}

/** The state of a stack after some tokens: logits of the last call, and the KV cache. */
interface Decoded {
  logits: NdArray;
  keys: NdArray[];
  values: NdArray[];
  memory?: NdArray; // the encoder's output
}

// The API of `glasshouse serve`, beside which the page may be

interface ServedModel {
  id: string;
  kind: string;
  max_len: number;
  vocab_size: number;
  generates: boolean;
  chats: boolean;
  steering: Record<string, string>;
  probes: Record<string, string>; // that requests may ask for: none where the server shows no internals
}

/** A token as it was drawn: its candidates are [id, probability, logprob]. */
interface DrawnToken {
  id: number;
  probability: number;
  logprob: number;
  candidates: [number, number, number][];
}

interface OpenedAnswer {
  id: string;
  model: string;
  source: number[];
  prompt: number[];
  output: DrawnToken[];
  end: DrawnToken | null;
  start: number;
  pieces: string[];
  finish_reason: string | null;
  scores: Record<string, (number | null)[]>; // of the output by probes
  settings: {
    temperature: number;
    top_k: number | null;
    top_p: number | null;
    min_p: number | null;
    seed: string;
    steer?: Record<string, number>;
  };
  stop: string[];
  stop_token_ids: number[];
  end_ids: number[];
  tokens: Record<string, Token>;
  state: Partial<PageState> | null;
}

interface AnswerComparison {
  parts_at: number | null;
  same_prompt: boolean;
  ids: number[];
  start: number;
  tokens: Record<string, Token>;
  reason: string | null; // why the models themselves cannot be compared; then the tensors are missing
  kl_divergence: PackedTensor;
  loss_a: PackedTensor;
  loss_b: PackedTensor;
  residual_distance: PackedTensor;
}

interface ChatMessage {
  role: "user" | "assistant";
  content: string;
}

/** A request for a completion or an answer of a chat. */
interface CompletionRequest {
  model: string;
  temperature: number;
  top_p: number;
  seed: number;
  top_k?: number;
  steer?: Record<string, number>;
  probes?: string[];
  return_token_ids?: boolean;
  max_tokens: number;
  messages?: ChatMessage[];
  prompt?: string | number[];
  stop?: string[];
  stop_token_ids?: number[];
}

/** An event of a streamed answer. */
interface StreamEvent {
  id: string;
  choices: {
    delta?: { content?: string };
    text?: string;
    finish_reason?: string | null;
    token_ids?: number[];
    scores?: Record<string, (number | null)[]>; // of tokens so far that had none
  }[];
  error?: { message: string };
}

// Elements

// What the page finds by a selector is made by `h`; those few that `s` makes have dataset, classList and focus as well.
interface Element {
  closest(selectors: string): HTMLElement | null;
  focus(options?: FocusOptions): void;
}
interface ParentNode {
  querySelector(selectors: string): HTMLElement | null;
  querySelectorAll(selectors: string): NodeListOf<HTMLElement>;
}

type Child = Node | string | null | undefined | false | Child[];

/** An event whose target is an element, as all are that are listened to on one. */
type ElementEvent<E extends Event> = E & { target: HTMLElement; currentTarget: HTMLElement };
type Listeners = { [Name in keyof HTMLElementEventMap]?: (event: ElementEvent<HTMLElementEventMap[Name]>) => void };

/** Properties of an element: these four, and attributes. */
interface Properties {
  class?: string;
  style?: Record<string, string | number>;
  on?: Listeners;
  data?: Record<string, unknown>;
  [attribute: string]: unknown;
}

/** What `token` shows: a token, or a piece of text that has no id. */
type Shown = Omit<Token, "id"> & { id: number | "" };

type Stepper = HTMLElement & { show: (value: number, most: number) => void };
type Slider = HTMLElement & { show: (value: number) => void; limit: (highest: number) => void };
/** What a token of a coloured text stands for: its colour as a share of the largest, null for none, and its figure. */
interface Told {
  share: number | null;
  text: string;
  data: Record<string, unknown>;
}

type ColouredText = HTMLElement & {
  show: (
    row: Token[],
    options: { selected: number | undefined; signed: boolean; told: (place: number) => Told },
  ) => void;
  colour: () => void;
};

type Choice<V> = HTMLElement & { show: (value: V) => void };

interface SliderOptions {
  min: number;
  max: number;
  step: number;
  shown?: (value: number) => string;
  oninput: (value: number) => void;
}

/** One bar of `bars`. */
interface Bar {
  name: Child;
  share: number; // of the width, 0 to 1
  second?: number; // a pale bar below it
  value: number;
  text: string;
  title?: string;
  class?: string;
  data?: Record<string, unknown>;
  onclick?: () => void;
}

/** A line of a chart. */
interface Series {
  name: string;
  colour: string;
  x: number[];
  y: number[];
  low?: number[];
  high?: number[];
  smooth?: number; // 0 to 1: a smoothed line over a pale one
  dots?: boolean;
  dashed?: boolean; // where it lies on another
  testid?: string;
}

interface ChartContent {
  series: Series[];
  from: number;
  to: number;
  log?: boolean;
  zero?: boolean;
}

interface ChartOptions {
  title: string;
  unit?: string;
  height?: number; // pixels
  onmove?: (step: number | null, isKey?: boolean) => void; // null: the pointer left
  onpick?: (step: number) => void;
  isMain?: boolean; // its cursor moves by keys
  along?: string; // what the horizontal axis counts
  testid?: string;
}

type Chart = HTMLElement & {
  show: (content: ChartContent) => void;
  mark: (step: number | null) => void;
  close: () => void;
};

/** What a run measured, beside its plan. */
interface MeasuredRun {
  tokens_per_second?: number;
  memory?: number;
}

type PlanPicture = HTMLElement & {
  show: (plan: TrainingPlan, measured?: MeasuredRun) => void;
  close: () => void;
};

// Heatmaps

/** A cell, or a square of `side` cells; the value is undefined until it is loaded, and below 0 where masked. */
interface HeatmapCell {
  row: number;
  column: number;
  side: number;
  value: number | undefined;
}

interface HeatmapOptions {
  label: string;
  read: (cell: HeatmapCell | null) => void; // the cell that is pointed at
  pick: (row: number, column: number) => void;
}

interface HeatmapMap {
  name: string;
  fetch: (level: number, row: number, column: number) => Promise<Tensor | null>; // null: there is no such tile
  rows: Token[];
  columns: Token[];
  row: number; // the selected ones
  column: number;
  scale: string;
  normalize: (value: number) => number; // its colour, 0 to 1
  isEmpty?: (row: number, column: number) => boolean; // whether the cell, and all above and right of it, are masked
}

/** A tile, and its picture in the scale and theme that `painted` names. */
interface Tile extends Tensor {
  picture: HTMLCanvasElement | null;
  painted: string;
}

interface TilesInView {
  level: number;
  places: [number, number][];
}

type Heatmap = import("glasshouse/heatmap.js").Heatmap;
type ShownHeatmap = Heatmap & { map: HeatmapMap };

// Page and views

/** A text box of the prompt and its tokens. */
interface PromptSide {
  name: Side;
  key: "text" | "target";
  area: HTMLTextAreaElement;
  strip: HTMLElement;
  fold: HTMLElement;
  node: HTMLElement;
}

/** A part of a view. */
interface Part {
  node: HTMLElement;
  draw: (changed: Changed) => void | Promise<void>;
  grow?: () => void | Promise<void>; // there are new metrics
  colour?: () => void; // the theme changed
  close?: () => void;
}

/** What `mount` of a view returns. */
interface MountedView {
  draw: (changed: Changed) => void | Promise<void>;
  close?: () => void;
}

type Page = import("glasshouse/main.js").Page;
type ViewContext = import("glasshouse/view_context.js").ViewContext;

/** A view at one checkpoint. */
interface Pane {
  context: ViewContext;
  node: HTMLElement;
  trouble: HTMLElement; // where errors are shown
  mounted: MountedView;
}

/** A view of the manifest; `mount` is there once its module is loaded. */
interface ViewEntry {
  name: string;
  title: string;
  mount?: (context: ViewContext, root: HTMLElement) => MountedView;
}

// Attention

type AttentionSelection = import("glasshouse/views/attention/selection.js").Selection;

/** The small maps of one layer. */
interface SmallMaps {
  line: HTMLElement;
  cells: { button: HTMLElement; canvas: HTMLCanvasElement; label: HTMLElement; layer: number; head: number }[];
  layer: number;
  loaded: string; // the topic of what is shown
  small: Tensor | null;
}

// Chat

type ChatSession = import("glasshouse/views/chat/session.js").Session;
type ChatAnswer = import("glasshouse/views/chat/session.js").Answer;

/** A token of an answer: its text, and what it was drawn from. */
interface AnswerToken extends Token {
  piece: string;
  drawn: DrawnToken | null;
  score: number | null; // by the probe of its answer
  isChosen: boolean; // by the user, in place of the one that was drawn
  isEnd?: boolean;
  tables: Record<string, Token>; // descriptions of the candidates
}

/** The token of another answer that an answer branches from. */
interface BranchPoint {
  answer: ChatAnswer;
  place: number;
  id: number;
}

/** What was asked, and the versions of its answer. */
interface ChatTurn {
  round: number;
  user: string | null;
  prompt?: string; // of an answer that was opened by its id
  n_prompt?: number;
  versions: ChatAnswer[];
  at: number; // the version that is shown
}

interface ChatPage {
  begin: (answer: ChatAnswer) => void;
  draw: () => void;
}

// Interventions

/** A cell of the ablation grid: what it edits, and where that is. */
interface GridCell {
  button: HTMLButtonElement;
  at: { layer: number; head?: number };
  name: string;
}

/** Edits with undo and redo. */
interface EditHistory {
  make: (changes: Partial<PageState>, kind?: string) => void;
  put: (site: string, edit: Edit | null, more?: Partial<PageState>, kind?: string) => void;
  undo: () => void;
  redo: () => void;
  readonly canUndo: boolean;
  readonly canRedo: boolean;
  key: (event: KeyboardEvent) => void;
}

/** The request function of a sweep: it throws Superseded once the sweep is stopped. */
type SweepRequest = <K extends Endpoint>(
  name: K,
  body: RequestBody,
  options?: RequestOptions,
) => Promise<Responses[K]>;

/** A row of the patching grid: a layer, or one of its heads. */
interface PatchRow {
  layer: number;
  head?: number;
}

/** The box of the second text. */
type SecondText = HTMLElement & { show: () => void; close: () => void };

/** A stack of blocks in the ablation grid, and the kinds of heads that its layers have. */
interface AblationStack {
  prefix: string;
  title: string;
  layers: number;
  groups: { z: string; all: string; title: string; short: string }[];
}

// Circuit

/** What is known of the circuit of two texts. */
interface KnownCircuit {
  estimates: EdgeEffects;
  circuit: FoundCircuit | null;
}

/** The parts of the name of a writer or a reader. */
interface ComponentName {
  stack: string; // "encoder.", "decoder." or none
  kind: string; // such as z, cross_z, q, cross_k, ffn, ffn_out, embed, logits
  layer: number;
  head: number;
}

/** A component in the graph, in pixels. */
interface GraphNode {
  name: string; // as a writer; "logits" writes nothing
  label: string;
  x: number;
  y: number;
}

interface GraphOptions {
  room: number; // pixels
  chosen: string; // the key of an edge
  href: (node: string) => string;
  pick: (edge: CircuitEdge) => void;
}

// Notes

/** A piece on the screen; some have to be closed. */
type DrawnPiece = HTMLElement & { close?: () => void };
type NotesCard = import("glasshouse/views/notes/card.js").Card;

// Overview

type Flow = import("glasshouse/views/overview/flow.js").Flow;

/** What one head moves to a position, and the key of which most comes. */
interface HeadFlow {
  part: OverviewPart;
  layer: number;
  head: number;
  key: number;
  weight: number;
  share: number;
}

/** Where to zoom in: a layer, one of its heads, or one product of a query and a key. */
interface Zoom {
  layer: number;
  site: string;
  head?: number;
  key?: number;
  product?: boolean;
}

interface PictureOptions {
  room: number; // pixels
  outcome: string | null; // what is predicted at the selected column
  selected: number;
  layer: number;
  zoom: (where: Zoom) => void;
  select: (place: number) => void;
}

/** A stack in the picture: where its columns begin, their width, where its embeddings are, and how flat it is. */
interface Placed {
  flow: Flow;
  x: number;
  column: number;
  floor: number;
  scale: number;
}

// Residual stream

/** A cell of the table with its numbers N. */
interface TableCell<N> {
  word?: string;
  said: string;
  data: N;
}

/** A cell on the screen. */
interface DrawnCell<N> {
  node: HTMLElement;
  figure: HTMLElement;
  data: N;
}

/** What the cells of the logit lens are coloured by. */
interface LensColour {
  text: string;
  share: (one: LensNumbers, outputs: number) => number;
  figure: (one: LensNumbers) => string;
  legend: (outputs: number) => [string, string];
}

interface LensNumbers {
  id: number;
  probability: number;
  entropy: number;
  rank: number;
}

type TokenChooser = HTMLSelectElement & {
  show: (rows: Candidate[], id: number | undefined, none: string) => void;
};

/** What the table shows: responses of one endpoint as cells with numbers N. */
interface TableContent<K extends "lens" | "norms", N> {
  title: string;
  about: string;
  endpoint: K;
  controls: Child[];
  draw: () => void;
  share: (one: N) => number;
  figure: (one: N) => string;
  legend: () => [string, string];
  forget?: () => void;
  cells: (found: Responses[K], width: number) => TableCell<N>[][];
}

/** A part that adds to a logit. */
interface Contribution {
  kind: "start" | "heads" | "cross" | "ffn";
  name: string;
  layer?: number;
  head?: number;
  value: number;
}

interface ContributionGroup {
  name: string;
  layer?: number;
  parts: Contribution[];
  adds: number;
}

// Run

/** A chart of metrics; its curves are [name, title, colour, whether each step is noisy]. */
interface MetricChart {
  name: string;
  title: string;
  unit?: string;
  height?: number;
  curves: [string, string, string, boolean][];
  scales?: boolean; // by the choice of a logarithmic scale
  zero?: boolean;
}

// Walkthrough

/** A node of the diagram of a block; `at` and `size` are pixels along the stream. */
interface DiagramNode {
  node: string;
  inBlock: boolean;
  part: string;
  label: string;
  kind: "on" | "off" | "plus"; // on the stream, on a branch, or a sum
  at: number;
  size: number;
}

/** Nodes of one branch, and the sum that it ends in. */
interface DiagramBranch {
  nodes: DiagramNode[];
  plus: DiagramNode;
  from: DiagramNode; // before which it leaves the stream
}

/** A vector in a figure. */
interface VectorRow {
  sign?: string;
  name: string;
  value: PackedTensor;
  captions?: string[] | null;
}

/** A card of the list; its inside is filled when it is first opened. */
interface ListedCard {
  key: string;
  card: StepCard;
  node: HTMLElement;
  head: HTMLElement;
  body: HTMLElement;
  told: DescribedCard;
  fill: () => void;
  filled: boolean;
}

/** The symbols of y = W x + b. */
interface LinearLetters {
  y: string;
  W: string;
  x: string;
  b: string;
}

/** The words of a step that changes scores. */
interface ChangeWords {
  name: string;
  formula: string;
  legend: string[][];
  why: string;
  before: string; // titles of the columns
  after: string;
  added?: string;
  gone?: (j: number) => boolean; // whether a key is masked
}

/** How a number is shown. */
interface CellOptions {
  bare?: boolean; // by its colour alone
  mark?: boolean;
  share?: boolean; // on the scale from 0 to 1
}

interface KeyedColumn {
  title?: string;
  class?: string;
  of: (j: number) => Child;
}

/** What was drawn on a canvas while a picture was taken. */
interface Drawn {
  shapes: SVGElement[];
  texts: { x: number; y: number; node: SVGElement }[];
  hasPixels: boolean;
}
