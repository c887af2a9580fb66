// The work items of attention's backward pass, and their steps.
//
// An item is a block of kBlockKv keys of one key head, and the blocks of kBlockQ queries that see
// them, of every query head of its part of the group. A step is one such block of queries:
//
//                 queries 0 ...                    causal mask: keys see later queries only
//   keys 0      | s0 s1 s2 s3 s4 s5 |              item 0: six steps
//   keys 128    |       s0 s1 s2 s3 |              item 1: four steps
//   keys 256    |             s0 s1 |              item 2: two steps
//
// The plan of the host assigns items to CTAs, or to clusters of kCtas CTAs that share each item.

#pragma once

#include "blind.cuh"

namespace jaxkernels {

// What gradients.py chooses for every kernel, by macros.
struct GradientConfig {
  using Element = JK_ELEMENT;
  // What dk and dv are stored as.
  using Output = JK_OUTPUT;
  // Head dimensions of queries and of values, padded to multiples of 16.
  static constexpr int kHeadDim = JK_HEAD_DIM;
  static constexpr int kValueDim = JK_VALUE_DIM;
  // A query sees keys from `left` before it to `right` behind it.
  static constexpr bool kHasLeft = JK_HAS_LEFT;
  static constexpr bool kHasRight = JK_HAS_RIGHT;
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
  static constexpr bool kSoftCap = JK_SOFT_CAP;
  // Whether queries that are no padding may see no key.
  static constexpr bool kSeesNothing = JK_SEES_NOTHING;
  // Whether blocks of keys add to dQ in their order: equal operands then give equal bits.
  static constexpr bool kInOrder = JK_IN_ORDER;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, num_kv_heads, group_size;
  int group_parts;  // Items that share the query heads of a key head.
  int num_kv_blocks;
  int plan_columns;
  int heads_inside;  // Whether steps visit a block of queries of all heads, then the next block.
  int left, right;
  float factor;  // What a product is multiplied by: to logits in base 2, or to those over the cap.
  float cap;     // The soft cap in base 2.
  float scale;   // What dk is multiplied by.
  BlindSums sums;  // Of dO.
};

// Arrays that are read by ordinary instructions. Those that Config leaves out are not touched.
struct Arrays {
  // For each CTA (for each cluster): how many items it has, and their numbers: twice that of the
  // block of keys, among all heads, plus one if blocks of queries are visited from the first one.
  const int* plan;
  const int* key_lengths;
  const int* query_segments;  // Rows are whole blocks.
  const int* key_segments;
  // (batch, block of keys, 4): the blocks of queries that may share a segment, and those of one
  // segment only.
  const int* segment_blocks;
  // (batch, block of queries): the first block of keys that visits it, as far as segments decide.
  const int* first_kv_blocks;
  const int* query_offset;
  const float* blind_sums;  // (batch, head, part, column).
  int* turns;  // (batch, head, 16 queries, CTA of a cluster): how many blocks of keys have added.
};

struct Item {
  int batch, kv_head;
  int part;  // The number of this part of the group.
  int first_key;
  int first_head, num_heads;
  int first_block, end_block;  // Blocks of queries that see some of the keys.
  int same_first, same_end;    // Blocks that no mask of segments touches.
  int key_end;                 // Keys from here on are padding.
  bool is_upward;              // Whether blocks are visited from the first one to the last one.

  __device__ __forceinline__ int num_steps() const {
    return num_heads * max(end_block - first_block, 0);
  }
};

// A step, as the producer describes it: the others have no registers to find out themselves.
struct Step {
  int block;  // Of queries.
  int head;
  int turn;  // How many blocks of keys add to its block of dQ before this one.
  bool hides_by_index, hides_by_segment;  // Which masks it needs.
};

// The steps of an item, one after the other.
class Steps {
 public:
  __device__ __forceinline__ Steps(const Item& item, const Problem& problem)
      : heads_inside_(problem.heads_inside != 0),
        head_(item.first_head),
        first_head_(item.first_head),
        end_head_(item.first_head + item.num_heads),
        block_(item.is_upward ? item.first_block : item.end_block - 1),
        first_(block_),
        end_(item.is_upward ? item.end_block : item.first_block - 1),
        stride_(item.is_upward ? 1 : -1) {}

  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ int block() const { return block_; }
  __device__ __forceinline__ void next() {
    if (heads_inside_) {
      if (++head_ == end_head_) head_ = first_head_, block_ += stride_;
    } else {
      block_ += stride_;
      if (block_ == end_) block_ = first_, ++head_;
    }
  }

 private:
  bool heads_inside_;
  int head_, first_head_, end_head_;
  int block_, first_, end_, stride_;
};

// The items of this CTA, in the order of the plan. It keeps no more than a number: consumers have
// no registers for more. Config has kBlockQ and the masks.
template <typename Config, int kBlockKv, int kCtas = 1>
class ItemSchedule {
 public:
  static constexpr int kBlockQ = Config::kBlockQ;

  __device__ __forceinline__ ItemSchedule(const Problem& problem, const Arrays& arrays)
      : problem_(problem), arrays_(arrays) {}

  __device__ __forceinline__ bool has_item() const { return nth_ < plan()[0]; }
  __device__ __forceinline__ void advance() { ++nth_; }
  // The position of the first query in the sequence.
  __device__ __forceinline__ int offset() const {
    return Config::kQueryOffset ? *arrays_.query_offset : 0;
  }

  __device__ __forceinline__ Item item() const {
    const int entry = plan()[1 + nth_];
    Item item;
    item.is_upward = entry % 2 != 0;
    const int stream = entry / 2 / problem_.num_kv_blocks;
    const int kv_block = entry / 2 - stream * problem_.num_kv_blocks;
    const int heads = problem_.num_kv_heads * problem_.group_parts;
    item.batch = stream / heads;
    const int head_part = stream - item.batch * heads;
    item.kv_head = head_part / problem_.group_parts;
    item.part = head_part - item.kv_head * problem_.group_parts;
    item.num_heads = problem_.group_size / problem_.group_parts;
    item.first_head = item.kv_head * problem_.group_size + item.part * item.num_heads;
    item.first_key = kv_block * kBlockKv;
    item.key_end = problem_.num_keys;
    if constexpr (Config::kKeyLengths) {
      item.key_end = min(max(arrays_.key_lengths[item.batch], 0), problem_.num_keys);
    }
    find_blocks(item, kv_block);
    return item;
  }

  // A step of the item, as the consumer of keys first_key to first_key + kKeys - 1 needs it.
  template <int kKeys>
  __device__ __forceinline__ Step describe(const Item& item, int first_key, int offset, int block,
                                           int head) const {
    const int position = block * kBlockQ + offset;
    bool by_index = first_key + kKeys > item.key_end;
    if constexpr (Config::kHasRight) {
      by_index |= first_key + kKeys - 1 > position + problem_.right;
    }
    if constexpr (Config::kHasLeft) {
      by_index |= first_key < position + kBlockQ - 1 - problem_.left;
    }
    const bool by_segment =
        Config::kSegments && (block < item.same_first || block >= item.same_end);
    return {block, head, turn_of(item, offset, block), by_index, by_segment};
  }

 private:
  __device__ __forceinline__ const int* plan() const {
    return arrays_.plan + blockIdx.x / kCtas * problem_.plan_columns;
  }

  // Which blocks of queries see the keys.
  __device__ __forceinline__ void find_blocks(Item& item, int kv_block) const {
    const int offset = this->offset();
    const int last_key = min(item.first_key + kBlockKv, item.key_end) - 1;
    int first = 0, end = problem_.num_queries;
    if constexpr (Config::kHasRight) first = max(item.first_key - problem_.right - offset, 0);
    if constexpr (Config::kHasLeft) {
      end = min(max(last_key + problem_.left + 1 - offset, 0), problem_.num_queries);
    }
    if (last_key < item.first_key) end = 0;
    item.first_block = first / kBlockQ;
    item.end_block = (end + kBlockQ - 1) / kBlockQ;
    item.same_first = 0, item.same_end = 0;
    if constexpr (Config::kSegments) {
      const int* blocks =
          arrays_.segment_blocks + (item.batch * problem_.num_kv_blocks + kv_block) * 4;
      item.first_block = max(item.first_block, blocks[0]);
      item.end_block = min(item.end_block, blocks[1]);
      item.same_first = blocks[2], item.same_end = blocks[3];
    }
  }

  __device__ __forceinline__ int turn_of(const Item& item, int offset, int block) const {
    if constexpr (!Config::kInOrder) return 0;
    int first = 0;
    if constexpr (Config::kHasLeft) {
      first = max(block * kBlockQ + offset - problem_.left, 0) / kBlockKv;
    }
    if constexpr (Config::kSegments) {
      const int num_blocks = (problem_.num_queries + kBlockQ - 1) / kBlockQ;
      first = max(first, arrays_.first_kv_blocks[item.batch * num_blocks + block]);
    }
    return item.first_key / kBlockKv - first;
  }

  const Problem& problem_;
  const Arrays& arrays_;
  int nth_ = 0;
};

}  // namespace jaxkernels
